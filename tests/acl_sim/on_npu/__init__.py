"""Tests that need torch_npu. They run in a process of their own: tests/backends/test_npu.py."""
