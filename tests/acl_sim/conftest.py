"""Where torch_npu cannot be imported, tests/backends/test_npu.py runs its tests in a process."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch_npu") else ["on_npu"]
