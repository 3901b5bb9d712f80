"""Compile the kernels of a decoding step for Hopper, in every form that they have."""

import torch
from mezzo_core.testing.compile_only import compile_only
from mezzo_gsa.ops.gsa import GSAState
from mezzo_gsa.ops.gsa.form import StepForm
from mezzo_gsa.ops.gsa.step_op import gsa_step_, gsa_step_projected_


def step(B, HQ, H, M, K, V, dtype, *, gate=True, strength=False, between="softmax"):
    """Launch a step from separate tensors."""
    q, k, v = (torch.zeros(B, heads, D, dtype=dtype) for heads, D in ((HQ, K), (H, K), (H, V)))
    g = torch.zeros(B, H, M) if gate else None
    s = torch.zeros(B, H, M) if strength else None
    gsa_step_(q, k, v, g, s, *empty(B, H, M, K, V), 1.0, between)


def layer(B, HQ, H, M, D, dtype, *, constant=False, norm=True, swish=True, between="softmax"):
    """Launch a layer's step."""
    x = torch.zeros(B, (HQ + 2 * H) * D + (0 if constant else H * M), dtype=dtype)
    logits = torch.zeros(H * M, dtype=dtype) if constant else None
    weight = torch.zeros(HQ * D, dtype=dtype) if norm else None
    state = empty(B, H, M, D, D)
    gsa_step_projected_(x, logits, weight, *state, HQ, *StepForm(1.0, between, 8.0, swish))


def empty(B, H, M, K, V):
    return GSAState(torch.zeros(B, H, M, K), torch.zeros(B, H, M, V))


with compile_only() as compiled:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        layer(1, 4, 4, 64, 512, dtype)
        step(1, 4, 4, 64, 512, 512, dtype)
    for between in ("none", "swish", "relu", "relu_squared"):
        layer(1, 4, 4, 64, 512, torch.bfloat16, between=between)
    layer(1, 32, 8, 32, 128, torch.bfloat16, constant=True, norm=False, swish=False)
    step(2, 4, 2, 20, 40, 72, torch.bfloat16, gate=False, strength=True)
    step(2, 4, 2, 128, 512, 32, torch.float32, strength=True)
    step(1, 1, 1, 16, 32, 32, torch.float32)
    assert {"step_keys_kernel", "step_values_kernel", "step_norm_kernel"} <= {
        name.rsplit(".")[-1] for name in compiled
    }, compiled

    for B in (64, 65, 128, 1000):  # as wide as tiles get
        if B == 65:
            known = len(compiled)
        layer(B, 4, 4, 64, 512, torch.bfloat16)
    assert not compiled[known:], f"another batch compiled {compiled[known:]}"
