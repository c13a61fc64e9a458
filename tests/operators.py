"""Builds of vLLM's operators: its wheel for x86 has one for each kind of processor, and loads one.

Each registers the namespace `_C` with torch, so a second one in a process aborts it. Only vLLM may
choose (`import_kernels` in vllm/platforms/cpu.py): no code here imports `vllm._C` by name.
"""

import importlib.util
import platform
import re
from pathlib import Path

_FEATURES = {
    "_C_AVX2": {"_is_avx512_supported": False, "_is_avx512_bf16_supported": False},
    "_C_AVX512": {"_is_avx512_supported": True, "_is_avx512_bf16_supported": False},
    "_C": {"_is_avx512_supported": True, "_is_avx512_bf16_supported": True},
}
"""By build: the processor features, as functions of `torch.cpu`, with which vLLM loads it."""


def runnable_builds() -> list[str]:
    """Builds in the installed vLLM that this processor can run."""
    import torch

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    shipped = {path.name.split(".")[0] for path in Path(spec.origin).parent.glob("_C*.so")}
    if platform.machine() != "x86_64":
        return ["_C"]
    return [
        build
        for build, features in _FEATURES.items()
        if build in shipped
        and all(getattr(torch.cpu, name)() for name, wanted in features.items() if wanted)
    ]


def pretend_processor(build: str) -> None:
    """Make vLLM, which is not imported yet, detect a processor for which it loads ``build``."""
    import torch

    for name, answer in _FEATURES[build].items():
        setattr(torch.cpu, name, lambda answer=answer: answer)


def loaded_builds() -> list[str]:
    """The builds that this process has loaded. One of them is in no Python module: vLLM loads it
    under a name that the library does not define."""
    maps = Path("/proc/self/maps").read_text()
    return sorted(set(re.findall(r"/vllm/(_C\w*)\.[\w.-]*so$", maps, re.MULTILINE)))


def describe() -> str:
    """vLLM's version and the build of its operators in use. Loads the operators."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    builds = ", ".join(loaded_builds()) or "none"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"vLLM {vllm.__version__}, operators {builds}; torch {torch.__version__} on {capability}"
