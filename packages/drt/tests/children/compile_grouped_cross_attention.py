"""Compile the kernels of grouped cross-attention for Hopper, in every form; look for spills."""

import torch
import triton
from mezzo_core.testing.compile_only import compile_apart, compile_only, keep_kernels, stack_of
from mezzo_drt.ops.grouped_cross_attention import op

CAPPED = {"3.4": 48, "3.8": 32}
"""Bytes that the forward spills in Triton's versions; in the pinned one it spills 16 at most."""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def attend(L, D, dtype=BF16, *, M=None, R=8, H=12, B=1, N=40, S=5, softmax1=True):
    """Launch a forward and a backward."""
    q = torch.zeros(B, N, M or L + 1, H, D, dtype=dtype)
    k = torch.zeros(B, S, L, H, D, dtype=dtype)
    indices, weights = torch.zeros(B, N, R, dtype=torch.int64), torch.zeros(B, N, R)
    form = (None, None, None, None, softmax1, 0.1)
    _, lse = op._attention(q, k, k, indices, weights, *form)
    op._attention_bwd(q, q, k, k, indices, weights, lse, *form)


def published(compiled):
    """The published sizes: few spills, and nothing new for other lengths and batches."""
    with keep_kernels() as kernels:
        for softmax1 in (True, False):
            attend(64, 64, softmax1=softmax1)
        attend(64, 64, FP16)
    assert len(kernels) == 12, "a forward, queries, and chunks in two launches"
    stacks = [stack_of(kernel) for kernel in kernels]
    # The forward's registers are capped, so that more programs run on a multiprocessor.
    limits = [CAPPED.get(triton.__version__.rpartition(".")[0], 16), 0, 0, 0] * 3
    spilled = any(stack > limit for stack, limit in zip(stacks, limits, strict=True))
    assert not spilled, f"bytes of registers are spilled: {stacks}"
    known = len(compiled)
    for B, N, S in ((2, 33, 33), (1, 2048, 2048), (3, 18, 1)):
        attend(64, 64, B=B, N=N, S=S)
    assert not compiled[known:], f"new lengths compiled {compiled[known:]}"
    attend(64, 64, M=30)
    assert len(compiled) > known, "compilations are seen"


def lengths(compiled):
    """Chunks of all lengths, of narrow heads and wide ones; queries of few and many places."""
    for L, D in ((16, 32), (100, 16), (128, 128)):
        attend(L, D)
    attend(64, 64, FP32, M=1, R=1)
    attend(64, 64, M=200, R=64)


def widths(compiled):
    """The widest heads, and those of float32."""
    attend(64, 256)
    for D in (64, 256):
        attend(64, D, FP32)


PARTS = {part.__name__: part for part in (published, lengths, widths)}


def compile_part(name):
    with compile_only(assembled=name == "published") as compiled:
        PARTS[name](compiled)
        assert compiled, "nothing was compiled"


compile_apart(compile_part, list(PARTS))
