"""Compile the kernels of single rows for Hopper, in every form; a new length compiles nothing."""

import itertools

import torch
from mezzo_core.testing.compile_only import compile_only
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.triton import rows

FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16


def launch(norm, dtype, *, m=2, S=16, B=4, C=1024, H=16, step=3):
    """Launch all kernels as the algorithm does: on whole tiles, and on a step of each."""
    form = Form(H, 1.0, norm, 1e-5, True, 1)
    raw, pair = (torch.zeros(m, S, B, width * C, dtype=dtype) for width in (3, 2))
    x, y, h = (torch.zeros(m, S, B, C, dtype=d) for d in (dtype, dtype, FLOAT))
    weight, total = torch.zeros(2, m, C)
    here, one = slice(step, step + 1), torch.zeros(m, 1, B, C)
    q = raw.chunk(3, -1)[0]
    rows.normed(q, weight, form, x)
    rows.split_pair(pair[:, here], weight, form, x[:, here], y[:, here])
    rows.add_normed(x[:, here], y[:, here], 1.0, weight, form, one, y[:, here])
    rows.add_normed(one, y[:, here], 1.0, weight, form, x[:, here], y[:, here])
    rows.normed_bwd(x, q, weight, form, None, 1.0, None, q)
    rows.normed_bwd(x, y, weight, form, h, 1.0, h, None)
    rows.normed_bwd(x[:, here], y[:, here], weight, form, h[:, here], 1.0, one, y[:, here])
    if norm != "none":
        rows.add_norm_weight_grad(x, q, form, total)
        rows.add_norm_weight_grad(h, x, form, total)
    rows.gelu(x, x)
    rows.gelu_bwd(x[:, here], y[:, here], y[:, here])
    rows.head_products(x, y, torch.zeros(m, S, B, H))


with compile_only() as compiled:
    for norm, dtype in itertools.product(("rms", "layer", "none"), (BFLOAT, HALF, FLOAT)):
        launch(norm, dtype)
    launch("rms", BFLOAT, C=1408, H=22)
    launch("layer", BFLOAT, C=4096, H=32)
    launch("rms", FLOAT, C=48, H=3)
    known = len(compiled)
    for m, S, B in ((1, 1, 1), (24, 16, 3), (3, 77, 5), (1, 16, 17)):
        launch("rms", BFLOAT, m=m, S=S, B=B, step=0)
    assert not compiled[known:], f"a new length compiled {compiled[known:]}"
    assert compiled, "nothing was compiled"
