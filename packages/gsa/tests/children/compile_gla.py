"""Compile GLA's kernels for Hopper, on a machine without a GPU; a new length compiles nothing."""

from functools import partial

import torch
from mezzo_core.testing.compile_only import compile_apart, compile_only, keep_kernels, stack_of
from mezzo_gsa.ops.gla import LayerForm, op
from mezzo_gsa.ops.gla.step import gla_step_, gla_step_layer_
from mezzo_gsa.ops.norms.op import gated_norm_bwd, gated_norm_op

TRAINED = {"gate_kernel", "scores_kernel", "outputs_kernel", "keys_bwd_kernel"}
PUBLISHED = "channel gates in bfloat16"
SPILLED = {"keys_bwd_kernel": 256}
"""Bytes of registers that a thread spills at most in this form; in all other kernels none."""
NORMED = {"gated_norm_kernel", "gated_norm_bwd_kernel"}
STEPPED = {"step_state_kernel", "gated_norm_kernel"}


def gla(T, K, V, dtype, *, B=1, HQ=4, H=2, head_gate=False, packed=False, state=False):
    """Launch a forward and a backward."""
    q = torch.zeros(B, T, HQ, K, dtype=dtype)
    k, v = torch.zeros(B, T, H, K, dtype=dtype), torch.zeros(B, T, H, V, dtype=dtype)
    g = torch.zeros(B, T, H, 1 if head_gate else K)
    borders = torch.tensor([0, 3, T]) if packed else None
    initial = torch.zeros(2 if packed else B, H, K, V) if state else None
    out, final = op.gla(q, k, v, g, initial, borders, K**-0.5)
    dfinal = torch.zeros(final.shape[0], HQ, K, V) if state and HQ == H else None
    op.gla_bwd(out, dfinal, q, k, v, g, initial, borders, K**-0.5)


def norm(rows, D, dtype, *, gated):
    """Launch GSA's norm, or GLA's with an output gate, and its backward."""
    x, weight = torch.zeros(rows, D, dtype=dtype), torch.zeros(D)
    z = torch.zeros(rows // 2, 2 * D + 8, dtype=dtype)[:, 8:].unflatten(1, (2, D))
    z = z if gated else None
    gated_norm_bwd(gated_norm_op(x, weight, z, 1e-5, dtype), x, weight, z, 1e-5)


def step(B, HQ, H, K, V, dtype, *, head_gate=False):
    """Launch a step from separate tensors."""
    q, k, v, g, state = step_inputs(B, HQ, H, K, V, dtype, 1 if head_gate else K)
    gla_step_(q, k, v, g.float(), state, 1.0)


def gla_layer(B, H, K, V, dtype, *, feature_map=None, gated=True):
    """Launch the step of a GLA layer."""
    z = torch.zeros(B, H * V, dtype=dtype) if gated else None
    weight = torch.zeros(V, dtype=dtype)
    form = LayerForm(0.1, feature_map, damping=16.0)
    inputs = step_inputs(B, H, H, K, V, dtype, K)
    gla_step_layer_(*inputs, weight, z, None, None, *form)


def hgrn2_layer(B, H, D, dtype, *, bound=0.0, learned=False):
    """Launch the step of an HGRN2 layer, with one bound or one for each channel."""
    q, _, v, logits, state = step_inputs(B, H, H, D, D, dtype, D)
    weight = torch.zeros(H * D, dtype=dtype)
    form = LayerForm(1.0, "swish", damping=1.0, lower_bound=bound)
    bounds = torch.zeros(2, H * D) if learned else None
    gla_step_layer_(q, None, v, logits, state, weight, None, None, bounds, *form)


def retnet_layer(B, H, K, V, dtype, *, feature_map=None, gated=True):
    """Launch the step of a RetNet layer."""
    q, k, v, g, state = step_inputs(B, H, H, K, V, dtype, 1)
    places, weight = torch.zeros(B, dtype=torch.int64), torch.zeros(V, dtype=dtype)
    z = torch.zeros(B, H * V, dtype=dtype) if gated else None
    form = LayerForm(0.1, feature_map, rope_base=10_000.0)
    gla_step_layer_(q, k, v, g.float(), state, weight, z, places, None, *form)


def step_inputs(B, HQ, H, K, V, dtype, KG):
    q, k, v = (torch.zeros(B, heads, D, dtype=dtype) for heads, D in ((HQ, K), (H, K), (H, V)))
    return q, k, v, torch.zeros(B, H, KG, dtype=dtype), torch.zeros(B, H, K, V)


def step_all(dtype):
    """Launch the step of each layer."""
    step(1, 4, 4, 256, 512, dtype)
    gla_layer(1, 4, 256, 512, dtype)
    hgrn2_layer(1, 16, 128, dtype, bound=0.5)
    hgrn2_layer(1, 16, 128, dtype, learned=True)
    retnet_layer(1, 8, 256, 512, dtype)


bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
# Gates of either kind in every dtype, packed and from a state.
FORMS = {
    PUBLISHED: (lambda: gla(100, 256, 512, bf16, HQ=4, H=4), TRAINED),
    "channel gates in float16, packed": (
        lambda: gla(100, 64, 64, fp16, packed=True, state=True),
        TRAINED,
    ),
    "channel gates in float32": (lambda: gla(100, 128, 128, fp32), TRAINED),
    "gates of the widest heads in bfloat16": (
        lambda: gla(100, 512, 1024, bf16, HQ=1, H=1, head_gate=True),
        TRAINED,
    ),
    "gates of narrow heads in float16": (
        lambda: gla(100, 8, 24, fp16, HQ=2, H=2, head_gate=True, state=True),
        TRAINED,
    ),
    "head gates in float32, packed": (
        lambda: gla(100, 64, 64, fp32, head_gate=True, packed=True),
        TRAINED,
    ),
    "norms": (
        lambda: (norm(64, 512, bf16, gated=True), norm(64, 2048, bf16, gated=False)),
        NORMED,
    ),
    "norms of other widths": (
        lambda: (norm(64, 40, fp16, gated=True), norm(64, 8192, fp32, gated=False)),
        NORMED,
    ),
    "steps in bfloat16": (lambda: step_all(bf16), STEPPED),
    "steps in float16": (lambda: step_all(fp16), STEPPED),
    "steps in float32": (lambda: step_all(fp32), STEPPED),
    "steps of other forms": (
        lambda: (
            step(2, 4, 2, 40, 72, bf16, head_gate=True),
            step(2, 1, 1, 1, 3, fp32),
            gla_layer(1, 32, 128, 128, bf16, feature_map="relu", gated=False),
            retnet_layer(1, 32, 128, 128, bf16, feature_map="relu", gated=False),
        ),
        STEPPED,
    ),
}


def compile_form(name):
    launch, kernels = FORMS[name]
    assembled = name == PUBLISHED
    with compile_only(assembled=assembled) as compiled, keep_kernels() as launched:
        launch()
    names = {name.rsplit(".")[-1] for name in compiled}
    assert names == kernels if kernels is STEPPED else names >= kernels, names
    if name == PUBLISHED:
        stacks = [(kernel.metadata.name, stack_of(kernel)) for kernel in launched]
        spilled = [(name, stack) for name, stack in stacks if stack > SPILLED.get(name, 0)]
        assert not spilled, f"bytes of registers are spilled: {spilled}"


def compile_lengths():
    """Launch one segment and several; then no other length or batch compiles anything."""
    with compile_only(keys_only=True) as compiled:
        for T in (100, 5000):
            gla(T, 64, 64, bf16)
        known = len(compiled)
        assert known, "kernels are seen"
        for B, T in ((1, 2000), (3, 4096), (2, 1500), (5, 1777)):
            gla(T, 64, 64, bf16, B=B)
        assert not compiled[known:], f"a new length compiled {compiled[known:]}"


def compile_batches():
    """Launch steps for a batch with the widest tiles; then no other batch compiles anything."""
    with compile_only(keys_only=True) as compiled:
        for layer in (gla_layer, retnet_layer):
            layer(64, 4, 256, 512, bf16)
            known = len(compiled)
            for B in (65, 128, 200):
                layer(B, 4, 256, 512, bf16)
            assert not compiled[known:], f"another batch compiled {compiled[known:]}"


LAWS = {"lengths": compile_lengths, "batches": compile_batches}


compile_apart(lambda name: LAWS.get(name, partial(compile_form, name))(), [*FORMS, *LAWS])
