"""A pytest plugin that makes vllm-ascend importable on a machine without an NPU, before anything
imports vLLM.

What only the hardware has, and packages that no code under test runs, are replaced. vllm-ascend's
own unit tests do the same. All that decides about blocks and KV memory is vllm-ascend's and vLLM's.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

_REPLACED = (
    "acl",
    "fla_npu",
    "mooncake",
    "msgpack",
    "quart",
    "scipy",
    "torch_npu",
    "vllm_ascend._build_info",
    "vllm_ascend.eplb",
    "vllm_ascend.vllm_ascend_C",
)


class _Replacements(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not f"{name}.".startswith(tuple(f"{replaced}." for replaced in _REPLACED)):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = MagicMock(name=spec.name)
        module.__spec__, module.__name__, module.__path__ = spec, spec.name, []
        module.__version__ = "1.14"  # type: ignore[attr-defined] # numba looks at scipy's
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "vllm_ascend._build_info":
            module.__device_type__ = "A2"  # type: ignore[attr-defined]


def _prepare() -> None:
    sys.meta_path.insert(0, _Replacements())
    import torch

    torch.npu = MagicMock()  # type: ignore[attr-defined]
    from vllm_ascend.utils import adapt_patch

    # As vLLM does: first when it loads plugins, then when its engine core starts, for its platform.
    adapt_patch(is_global_patch=True)
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm_ascend.core.kv_cache_interface import register_ascend_kv_cache_specs

    register_all_kvcache_specs(None)  # type: ignore[no-untyped-call]
    register_ascend_kv_cache_specs()


_prepare()
