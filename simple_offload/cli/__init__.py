"""The command ``simple-offload doctor``. Imports neither torch nor vLLM."""
