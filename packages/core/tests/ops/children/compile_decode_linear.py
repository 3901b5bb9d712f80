"""Compile the kernel of `decode_linear` for Hopper, in every form that it has."""

import torch
from mezzo_core.ops.decode_linear import triton
from mezzo_core.testing.compile_only import compile_apart, compile_only, keep_kernels


def launch(N, K, dtype, *, x_dtype=None, bias=False, norm=False):
    x, weight = torch.zeros(1, K, dtype=x_dtype or dtype), torch.zeros(N, K, dtype=dtype)
    bias = torch.zeros(N, dtype=dtype) if bias else None
    triton.decode_linear_fwd(x, weight, bias, torch.zeros_like(weight[0]) if norm else None, 1e-6)


def assemble(name):
    """Compile a form that is not compiled below; only if it is asked for, it has machine code."""
    with compile_only(assembled=name == "assembled"), keep_kernels() as kernels:
        launch(600, 64, torch.bfloat16)
    assert bool(kernels[0].asm["cubin"]) == (name == "assembled"), name


# Both are in Triton's cache then, and neither is taken for the other.
compile_apart(assemble, ["to PTX", "assembled", "to PTX"])

with compile_only() as compiled:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        launch(6400, 2048, dtype)
        launch(2048, 2048, dtype, x_dtype=torch.float32, bias=True, norm=True)
    for K in (1, 37, 2560, 8192, 16_384):
        launch(600, K, torch.bfloat16, norm=True)
    assert all(name.endswith("decode_linear_fwd_kernel") for name in compiled), compiled

    launch(2048, 4096, torch.bfloat16)
    known = len(compiled)
    for N in (1, 300, 6400, 50_000):
        launch(N, 4096, torch.bfloat16)
    assert not compiled[known:], f"another height compiled {compiled[known:]}"
