"""vLLM's command line, with processes that are forked: they have what the first one has imported.

vLLM forks them by default. For CPUs it spawns them, since OpenMP's threads do not survive a fork.
These servers have no such threads, and three processes that import vLLM take most of a start's
time.
"""

import multiprocessing
import runpy
from unittest.mock import patch

from examples.bench.child import without_collection

if __name__ == "__main__":
    with without_collection():
        import vllm.utils.system_utils
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            vllm.utils.system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
            import vllm.v1.worker.cpu_worker
        import vllm.entrypoints.openai.api_server
        import vllm.v1.engine.core

    # vLLM thaws all objects at the end, and looks for garbage among them: seconds.
    with patch("gc.unfreeze"):
        runpy.run_module("examples.vllm_command", run_name="__main__")
