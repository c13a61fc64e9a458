"""How fast blocks go between host memory and a CUDA device, path by path.

``python -m examples.copy_bench`` copies scattered blocks of 4 KiB to 2 MiB each way, and both
ways at once, with ``CudaBackend`` and with plain torch, and holds them against the peak: one
contiguous copy. Every path's bytes are checked before it is timed. Beside the largest blocks it
times small copies that somebody else makes.
"""
