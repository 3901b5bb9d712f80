"""Compile the kernels of gated linear attention's decoding step for Hopper, in every form."""

import torch
from mezzo_core.testing.compile_only import compile_only
from mezzo_gsa.ops.gla.step_op import gla_step_, gla_step_layer_


def inputs(B, HQ, H, K, V, dtype, KG):
    q, k, v = (torch.zeros(B, heads, D, dtype=dtype) for heads, D in ((HQ, K), (H, K), (H, V)))
    return q, k, v, torch.zeros(B, H, KG, dtype=dtype), torch.zeros(B, H, K, V)


def step(B, HQ, H, K, V, dtype, *, head_gate=False):
    """Launch a step from separate tensors."""
    q, k, v, g, state = inputs(B, HQ, H, K, V, dtype, 1 if head_gate else K)
    gla_step_(q, k, v, g.float(), state, 1.0)


def gla(B, H, K, V, dtype, *, feature_map=None, gated=True):
    """Launch the step of a GLA layer."""
    z = torch.zeros(B, H * V, dtype=dtype) if gated else None
    weight = torch.zeros(V, dtype=dtype)
    form = (0.1, feature_map, 16.0, 0.0, None, 1e-5)
    gla_step_layer_(*inputs(B, H, H, K, V, dtype, K), weight, z, None, *form)


def hgrn2(B, H, D, dtype, *, bound=0.0):
    """Launch the step of an HGRN2 layer."""
    q, _, v, logits, state = inputs(B, H, H, D, D, dtype, D)
    weight = torch.zeros(H * D, dtype=dtype)
    form = (1.0, "swish", 1.0, bound, None, 1e-5)
    gla_step_layer_(q, None, v, logits, state, weight, None, None, *form)


def retnet(B, H, K, V, dtype, *, feature_map=None, gated=True):
    """Launch the step of a RetNet layer."""
    q, k, v, g, state = inputs(B, H, H, K, V, dtype, 1)
    places, weight = torch.zeros(B, dtype=torch.int64), torch.zeros(V, dtype=dtype)
    z = torch.zeros(B, H * V, dtype=dtype) if gated else None
    form = (0.1, feature_map, None, 0.0, 10_000.0, 1e-5)
    gla_step_layer_(q, k, v, g.float(), state, weight, z, places, *form)


with compile_only() as compiled:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        step(1, 4, 4, 256, 512, dtype)
        gla(1, 4, 256, 512, dtype)
        hgrn2(1, 16, 128, dtype, bound=0.5)
        retnet(1, 8, 256, 512, dtype)
    step(2, 4, 2, 40, 72, torch.bfloat16, head_gate=True)
    step(2, 1, 1, 1, 3, torch.float32)
    gla(1, 32, 128, 128, torch.bfloat16, feature_map="relu", gated=False)
    retnet(1, 32, 128, 128, torch.bfloat16, feature_map="relu", gated=False)
    assert {name.rsplit(".")[-1] for name in compiled} == {"step_state_kernel", "step_norm_kernel"}

    for layer in (gla, retnet):
        for B in (64, 65, 128, 1000):  # as wide as tiles get
            if B == 65:
                known = len(compiled)
            layer(B, 4, 256, 512, torch.bfloat16)
        assert not compiled[known:], f"another batch compiled {compiled[known:]}"
