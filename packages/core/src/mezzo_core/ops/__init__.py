"""Differentiable functions of tensors, one folder each: api, reference, Triton form."""
