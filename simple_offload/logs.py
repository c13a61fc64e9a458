"""Log lines among vLLM's own."""

from typing import Any

from vllm.logger import init_logger


def get_logger(name: str) -> Any:
    """vLLM's kind of logger (``warning_once`` and the like) for module ``name``.

    vLLM configures the loggers below "vllm" only: one by any other name prints no INFO line.
    """
    return init_logger(f"vllm.{name}")
