"""Copies between pinned host memory and an Ascend NPU, through CANN's ACL runtime."""
