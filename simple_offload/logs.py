"""Loggers whose lines appear in vLLM's log."""

from typing import Any

from vllm.logger import init_logger


def get_logger(name: str) -> Any:
    """Return a logger of vLLM's kind (``warning_once`` and the like) for module ``name``.

    vLLM configures only loggers below "vllm": under any other name, INFO lines are lost.
    """
    return init_logger(f"vllm.{name}")
