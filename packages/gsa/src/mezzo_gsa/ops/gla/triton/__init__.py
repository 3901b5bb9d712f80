"""The kernels of gated linear attention, and their launches."""
