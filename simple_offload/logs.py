"""Loggers whose lines appear in vLLM's log."""

import logging


def get_logger(name: str) -> logging.Logger:
    """Return the logger of module ``name``.

    vLLM configures only loggers below "vllm": under any other name, INFO lines are lost.
    """
    return logging.getLogger(f"vllm.{name}")
