"""Bandwidth of block copies between host memory and a CUDA device, path by path: scattered blocks
of 4 KiB to 2 MiB each way, and both ways at once, beside the peak of one contiguous copy."""
