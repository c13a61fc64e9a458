"""Modules that children of ``run_child`` import. The process that they are forked from has them."""

from importlib import import_module

from examples.bench.child import without_collection

with without_collection():
    for name in (
        "tests.engine.child",
        "vllm.model_executor.models.gemma3",
        "vllm.model_executor.models.llama",
        "vllm.v1.worker.cpu_worker",
    ):
        import_module(name)
