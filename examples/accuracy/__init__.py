"""Accuracy by lm_eval over ``vllm serve``, without the connector and with it."""
