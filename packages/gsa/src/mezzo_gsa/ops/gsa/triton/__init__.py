"""The kernels of gated slot attention, and their launches."""
