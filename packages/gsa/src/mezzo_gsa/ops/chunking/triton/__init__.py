"""Functions on chunks for the kernels of several ops: states at borders, products inside chunks."""
