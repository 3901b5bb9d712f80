"""Compile all of RAT's kernels for Hopper, in every form."""

import torch
from mezzo_core.testing.compile_only import compile_apart, compile_only
from mezzo_rat.ops.gated_scan.op import STATE_EVERY, Saved
from mezzo_rat.ops.gated_scan.triton.backward import gated_scan_bwd
from mezzo_rat.ops.gated_scan.triton.forward import gated_scan_fwd
from mezzo_rat.ops.rat_attention import init_state, op, reserve
from mezzo_rat.ops.rat_attention.arguments import Form, SavedContinued

H, G = 4, 2


def rat(T, D, dtype, *, L=7, B=1, has_z=True, has_bias=True, rope="chunk", packed=False):
    """Launch a forward and a backward."""
    x = torch.zeros(B, T, ((2 + has_z) * H + 2 * G) * D, dtype=dtype)
    bias = torch.zeros(H, D) if has_bias else None
    borders = torch.tensor([0, 3, T]) if packed else None
    form = Form(H, G, has_z, L, rope, 1e4, D**-0.5)
    y, *kept = op.rat_attention(x, bias, borders, *form)
    op.rat_attention_bwd(y, x, bias, borders, y, *kept, *form)


def decode(D, dtype, *, B=2, rope="chunk"):
    """Launch what continues a state, forward and backward, and a step."""
    x = torch.zeros(B, 9, (3 * H + 2 * G) * D, dtype=dtype)
    state = init_state(B, H, D, dtype=dtype, device=x.device)
    state = reserve(state, 80, 7)
    form = Form(H, G, True, 7, rope, 1e4, D**-0.5)
    added = torch.tensor([9, 2])
    y, k, v, k_ends, v_ends, lse = op.rat_attention_continued(x, None, *state, added, *form)
    saved = SavedContinued(x, None, *state[:2], state.lengths, added, y, lse, k_ends, v_ends)
    op.rat_attention_continued_bwd(y, k, v, k_ends, v_ends, *saved, *form)
    op.rat_attention_step_(x[:, :1].contiguous(), torch.zeros(H, D), *state, *form)


def scan(B, T, C, dtype, *, packed=False):
    """Launch the gated scan, forward and backward."""
    zvg, dout = torch.zeros(B, T, 3 * C, dtype=dtype), torch.zeros(B, T, C, dtype=dtype)
    borders = torch.tensor([0, 3, T]) if packed else None
    bias = torch.zeros(C)
    _, _, kept = gated_scan_fwd(zvg, bias, None, borders, None, STATE_EVERY)
    saved = Saved(zvg, bias, None, borders, None, kept)
    gated_scan_bwd(dout, None, saved, STATE_EVERY)


def rat_widths_and_lengths(compiled):
    """Wide heads, each RoPE; then a new length compiles nothing, but the tiles for many ends."""
    for D, rope in ((64, "chunk"), (128, "token"), (256, None)):
        rat(100, D, torch.bfloat16, rope=rope)
    known = len(compiled)
    for B, T in ((1, 1), (3, 4096), (2, 16), (5, 77)):
        rat(T, 64, torch.bfloat16, B=B)
    assert not compiled[known:], f"a new length compiled {compiled[known:]}"
    rat(1025 * 7, 64, torch.bfloat16)  # the tiles for many ends
    assert len(compiled) > known, "compilations are seen"


def rat_forms(compiled):
    """Other dtypes, packed sequences of narrow heads, no gate and no bias; decoding."""
    rat(100, 64, torch.float32, has_z=False, has_bias=False)
    rat(100, 32, torch.float16, packed=True)
    decode(128, torch.bfloat16, rope="token")
    decode(32, torch.float32, rope=None)


def gated_scan(compiled):
    """Time split into spans and not, packed sequences and not."""
    scan(1, 600, 64, torch.bfloat16)
    scan(2, 20, 64, torch.float32, packed=False)
    scan(1, 600, 64, torch.bfloat16, packed=True)


PARTS = {part.__name__: part for part in (rat_widths_and_lengths, rat_forms, gated_scan)}


def compile_part(name):
    with compile_only() as compiled:
        PARTS[name](compiled)
        assert compiled, "nothing was compiled"


compile_apart(compile_part, list(PARTS))
