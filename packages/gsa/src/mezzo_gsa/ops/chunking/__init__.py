"""Chunks of rows, and the states at the borders of chunks, for eager PyTorch and for kernels."""
