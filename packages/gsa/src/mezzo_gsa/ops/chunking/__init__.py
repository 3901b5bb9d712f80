"""Rows cut into chunks, and the states at the borders of chunks: for eager PyTorch and kernels."""
