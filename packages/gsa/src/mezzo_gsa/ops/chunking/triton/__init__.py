"""What kernels of several ops do with chunks: states at their borders, products inside them."""
