"""Compile the kernels of rows and products for Hopper, in every form; a length compiles nothing."""

import torch
from mezzo_core.testing.compile_only import compile_only
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import (
    BackwardBuffers,
    ForwardBuffers,
    Matrices,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton import narrow, products, rows
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import Workspace

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
    rows.add_normed(x[:, here], y[:, here][None], 1.0, weight, form, one, y[:, here])
    partial = torch.zeros(8, m, 1, B, C)
    rows.add_normed(one, partial, 1.0, weight, form, x[:, here], y[:, here])
    rows.normed_bwd(y[:, here], one, weight, form, one, 1.0, one, y[:, here], partial)
    rows.normed_bwd(q, q, weight, form, None, 1.0, None, q)
    rows.normed_bwd(x, y, weight, form, h, 1.0, h, None)
    rows.normed_bwd(x[:, here], y[:, here], weight, form, h[:, here], 1.0, one, y[:, here])
    if norm != "none":
        rows.add_norm_weight_grad(x, q, form, total)
        rows.add_norm_weight_grad(h, x, form, total)
    rows.gelu(x, x)
    rows.gelu_bwd(x[:, here], y[:, here], y[:, here])
    rows.head_products(x, y, torch.zeros(m, S, B, H))


def launch_products(dtype, *, m=2, B=4, C=1024, F=4096):
    """Launch the products of a step, forward and backward; C = 48 has ragged parts."""
    x, pair, g, u = (torch.zeros(m, 1, B, K, dtype=dtype) for K in (C, 2 * C, F, F))
    o, kv = torch.zeros(m, C, C, dtype=dtype), torch.zeros(m, 2 * C, C, dtype=dtype)
    up, down = torch.zeros(m, F, C, dtype=dtype), torch.zeros(m, C, F, dtype=dtype)
    h, n = torch.zeros(m, 1, B, C), torch.zeros_like(x)
    for name, norm in (("rms", torch.zeros(m, C)), ("none", None)):
        form = Form(16, 1.0, name, 1e-5, True, 1)
        squares = products.product_add(x, o, x, 1.0, norm, form, h, n)
        products.product_gelu(n, up, g, squares, form)
    products.product_partial(g, down)
    products.product(n, kv)
    products.product_partial(pair, kv.mT)
    products.product_gelu_bwd(x, down.mT, u, g)
    products.product_partial(g, up.mT)


def launch_narrow(norm, dtype, *, m=2, S=16, B=128, H=16, C=128, F=512):
    """Launch a leaf of narrow layers, forward and backward."""
    form, leaf = Form(H, 1.0, norm, 1e-5, True, 1), range(16)
    sizes = ((3 * C, C), (C, C), (F, C), (C, F))
    norms = (None if norm == "none" else torch.zeros(m, C),) * 4
    w = Matrices(*(torch.zeros(m, *size, dtype=dtype) for size in sizes), *norms)
    x, slopes = torch.zeros(B, S, C), torch.zeros(H)
    for kind, run in (
        (ForwardBuffers, narrow.narrow_leaf),
        (BackwardBuffers, narrow.narrow_leaf_bwd),
    ):
        run(Workspace(kind.of(x, w, S, form), w, slopes, form, narrow), leaf)


with compile_only() as compiled:
    # Each norm and each dtype twice or more: a norm is arithmetic in float32, whatever was loaded.
    for norm, dtype in (("rms", BFLOAT), ("layer", HALF), ("none", FLOAT), ("none", BFLOAT)):
        launch(norm, dtype)
    launch("rms", HALF, C=1408, H=22)
    launch("layer", BFLOAT, C=4096, H=32)
    launch("rms", FLOAT, C=48, H=3)
    launch("rms", BFLOAT, B=128)  # so many rows that no kernel begins early
    known = len(compiled)
    for m, S, B in ((1, 1, 1), (24, 16, 3), (3, 77, 5), (1, 16, 17)):
        launch("rms", BFLOAT, m=m, S=S, B=B, step=0)
    assert not compiled[known:], f"a new length compiled {compiled[known:]}"
    for dtype, B in ((BFLOAT, 4), (HALF, 32), (BFLOAT, 128)):
        launch_products(dtype, B=B)
    launch_products(BFLOAT, m=12, C=48, F=128)
    known = len(compiled)
    launch_products(BFLOAT, B=1)
    launch_products(BFLOAT, B=11)
    assert not compiled[known:], f"a new number of rows compiled {compiled[known:]}"
    for norm, dtype in (("rms", BFLOAT), ("layer", HALF)):
        launch_narrow(norm, dtype)
    launch_narrow("none", BFLOAT, H=3, C=48, F=100)
    known = len(compiled)
    launch_narrow("rms", BFLOAT, m=1, S=48, B=5)
    assert not compiled[known:], f"a new size compiled {compiled[known:]}"
    assert compiled, "nothing was compiled"
