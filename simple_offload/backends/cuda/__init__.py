"""Copies between pinned host memory and a CUDA device: by DMA, or by a Triton kernel."""
