"""Kernels of the head's loss."""
