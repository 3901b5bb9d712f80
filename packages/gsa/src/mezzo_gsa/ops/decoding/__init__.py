"""What the decoding steps of several ops share: checks of states, and parts of kernels."""
