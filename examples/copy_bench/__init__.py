"""Bandwidth of block copies between host memory and a CUDA device, path by path.

``python -m examples.copy_bench`` copies scattered blocks of 4 KiB to 2 MiB each way, and both
ways at once, with ``CudaBackend`` and with plain torch, and compares them with the peak: one
contiguous copy. The bytes of every path are checked before it is timed. Beside the largest blocks
it times small copies on another stream.
"""
