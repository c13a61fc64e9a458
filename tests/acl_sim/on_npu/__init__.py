"""Tests that need torch_npu. tests/backends/test_npu.py runs them in a separate process."""
