"""RAT attention on a GPU. This file imports nothing, so that only the first launch loads Triton.

`launches` and `step` launch the kernels of `scan` (the recurrence), `ends` (attention) and
`elementwise` (gates and RoPE).
"""
