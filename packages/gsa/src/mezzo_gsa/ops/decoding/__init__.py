"""Parts that the decoding steps of several ops share: checks of states, functions for kernels."""
