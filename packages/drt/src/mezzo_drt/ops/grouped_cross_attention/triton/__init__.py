"""Kernels of grouped cross-attention, which read chunks by their index."""
