"""Compile the attention kernels for Hopper, in every form."""

import torch
from mezzo_core.testing.compile_only import compile_only
from mezzo_recurrent_transformer.ops.recurrent_layers import triton as kernels
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import (
    Attending,
    BackwardBuffers,
    Keys,
    Later,
    Matrices,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import Workspace


def work_of(form, tile, k_norm=None, **others):
    """Return a workspace with these buffers, and no others."""
    blank = dict.fromkeys(BackwardBuffers._fields)
    buffers = BackwardBuffers(**blank | others | {"attending": tile})
    weights = Matrices(**dict.fromkeys(Matrices._fields) | {"k_norm": k_norm})
    return Workspace(buffers, weights, torch.zeros(form.num_heads), form, kernels)


def attend(H, D, dtype, *, m=2, S=16, B=2, slots=64, first=32, b=1, past=False):
    """Launch each kernel."""
    C, form = H * D, Form(H, 1.0, "rms", 1e-6, True, b)

    def tile(channels=C, dtype=dtype):
        return torch.zeros(m, S, B, channels, dtype=dtype)

    k, v = torch.zeros(2, m, B, slots, C, dtype=dtype)
    keys = Keys(k, v, torch.zeros(B, dtype=torch.int64) if past else None, first)
    wide, stats = tile(dtype=torch.float32), tile(H, torch.float32)
    attending = Attending(*(tile() for _ in range(6)), stats)
    kernels.attend_earlier(work_of(form, attending._replace(o=wide)), keys)
    work = work_of(form, attending, do=tile(), delta=stats, dk=wide, dv=wide.clone())
    kernels.attend_tile(work, keys)
    kernels.attend_tile_bwd(work, keys, tile(3 * C))
    of_all = [torch.zeros(m, B, slots, x, dtype=y) for x, y in ((C, dtype), (H, torch.float32))]
    later = Later(of_all[0], of_all[0], of_all[1], of_all[1], first)
    kernels.pairs_bwd(work, later)


def attend_steps(H, D, dtype, *, b, m=2, S=16, B=2, step=1):
    """Launch the kernels of a step in a tile, forward and backward."""
    C, form = H * D, Form(H, 1.0, "rms", 1e-6, True, b)

    def tile(channels=C, dtype=dtype):
        return torch.zeros(m, S, B, channels, dtype=dtype)

    stats, (dk, dv), weight = tile(H, torch.float32), torch.zeros(2, m, S, B, C), torch.zeros(m, C)
    forward = Attending(*(tile() for _ in range(5)), dk, stats)
    out, kv = torch.zeros(m, b, B, C, dtype=dtype), torch.zeros(m, b, B, 2 * C, dtype=dtype)
    kernels.attend_step(work_of(form, forward, weight), kv if step else None, step, out)
    others = {"do": tile(), "delta": stats, "raw": tile(), "dk": dk, "dv": dv, "dpair": tile(2 * C)}
    kernels.pairs_step_bwd(work_of(form, forward._replace(o=tile()), weight, **others), step)


def attend_leaves(H, D, dtype, *, m=2, S=32, B=2, size=16):
    """Launch the kernels of leaves, forward and backward."""
    C, form = H * D, Form(H, 1.0, "rms", 1e-6, True, 1)
    q, kt, vt, k, v, do = torch.zeros(6, m, S, B, C, dtype=dtype)
    o, dk, dv = torch.zeros(3, m, S, B, C)
    stats = torch.zeros(m, S, B, H)
    attending = Attending(q, kt, vt, k, v, o, stats)
    kernels.attend_leaves(work_of(form, attending), size, size)
    others = {"do": do, "delta": stats, "dk": dk, "dv": dv}
    kernels.leaves_bwd(work_of(form, attending._replace(o=do), **others), size, size)


with compile_only() as compiled:
    for D in (16, 64, 128):
        attend(2, D, torch.bfloat16)
    attend(2, 32, torch.float16, S=32, b=32)
    attend(2, 64, torch.float32)
    attend(2, 64, torch.bfloat16, S=65, b=65)
    attend(22, 64, torch.bfloat16, past=True)
    known = len(compiled)
    for m, S, B, first in ((1, 16, 1, 0), (3, 13, 5, 39), (1, 1, 3, 7)):
        attend(2, 64, torch.bfloat16, m=m, S=S, B=B, slots=first + 40, first=first)
    assert not compiled[known:], f"new sizes compiled {compiled[known:]}"

    for D in (8, 64, 128):
        attend_steps(2, D, torch.bfloat16, b=8)
    for D, dtype in ((16, torch.float16), (32, torch.float32)):
        attend_steps(2, D, dtype, b=8)
    for b in (32, 128):
        attend_steps(22, 64, torch.bfloat16, S=b, b=b, step=0)
    attend_steps(16, 64, torch.bfloat16, b=1)
    known = len(compiled)
    for m, S, B, b, step in ((1, 16, 1, 2, 7), (3, 30, 5, 15, 0), (1, 16, 3, 16, 0)):
        attend_steps(2, 64, torch.bfloat16, b=b, m=m, S=S, B=B, step=step)
    assert not compiled[known:], f"new blocks compiled {compiled[known:]}"

    for D in (8, 64, 128):
        attend_leaves(2, D, torch.bfloat16)
    for D, dtype in ((16, torch.float16), (32, torch.float32)):
        attend_leaves(2, D, dtype)
    attend_leaves(22, 64, torch.bfloat16, S=64, size=32)
    known = len(compiled)
    for m, S, B, size in ((1, 64, 1, 16), (3, 30, 5, 15)):
        attend_leaves(2, 64, torch.bfloat16, m=m, S=S, B=B, size=size)
    assert not compiled[known:], f"new leaves compiled {compiled[known:]}"
