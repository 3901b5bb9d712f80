"""All kernels compile for Hopper, on a machine without a GPU; a new length compiles nothing.

Each form compiles in a process of its own, forked from one in which this file, with GSA's forms,
and `children/compile_gla.py` run as scripts.
Kernels of two forms that are equal come from Triton's cache.
"""

from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from mezzo_core.ops.ahead import compile_ahead
from mezzo_core.testing.compile_only import compile_apart, compile_only, keep_kernels, run_compiling
from mezzo_gsa.ops.gsa import GSAState, op
from mezzo_gsa.ops.gsa.arguments import Form, StepForm
from mezzo_gsa.ops.gsa.step import gsa_recurrent_projected, gsa_step_, gsa_step_projected_

SHARED_MEMORY = 227 * 1024  # bytes that one program may have on Hopper
TRAINED = {"gate_kernel", "segment_states_kernel", "slots_fwd_kernel", "slots_bwd_kernel"}
CONTINUED = {*TRAINED, "join_segments_kernel"}
STEPPED = {"step_keys_kernel", "step_values_kernel"}
NORMED = {*STEPPED, "gated_norm_kernel"}
BETWEEN = ("none", "swish", "relu", "relu_squared")


def apart(
    T, K, V, M, dtype, *, B=1, HQ=4, H=4, strength=False, packed=False, state=False,
    between="softmax", keep="weights",
):  # fmt: skip
    """Launch a forward and, if it keeps something, a backward on separate tensors."""
    q, k, v = (torch.zeros(B, T, n, D, dtype=dtype) for n, D in ((HQ, K), (H, K), (H, V)))
    g, s = torch.zeros(B, T, H, M), torch.zeros(B, T, H, M) if strength else None
    borders = torch.tensor([0, 3, T]) if packed else None
    S = 2 if packed else B
    first = [torch.zeros(S, H, M, D) if state else None for D in (K, V)]
    tensors, form = op.Tensors(None, q, k, v, g, s, *first, borders), Form(1.0, between, keep)
    out, k_last, v_last, *saved = op.gsa(*tensors, *form)
    last = (k_last, v_last) if state else (None, None)
    if keep != "nothing":
        op.gsa_bwd(out, *last, saved, *tensors, *form)


def projection(
    T, D, M, dtype, *, B=1, HQ=4, H=4, between="softmax", swish=True, keep="weights"
):  # fmt: skip
    """Launch a forward and, if it keeps something, a backward on a projection."""
    x = torch.zeros(B, T, (HQ + 2 * H) * D + H * M, dtype=dtype)
    form = Form(1.0, between, keep, 8.0, swish, HQ, H, M)
    out, _, _, *saved = op.gsa(*op.Tensors(x), *form)
    if keep != "nothing":
        op.gsa_bwd(out, None, None, saved, *op.Tensors(x), *form)


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
    form = StepForm(1.0, between, 8.0, swish)
    gsa_step_projected_(x, logits, weight, *empty(B, H, M, D, D), HQ, *form)


def tokens(B, T, HQ, H, M, D, dtype):
    """Launch a layer's steps of a few tokens."""
    x = torch.zeros(B, T, (HQ + 2 * H) * D + H * M, dtype=dtype)
    lengths, weight = torch.zeros(B, dtype=torch.int64), torch.zeros(HQ * D, dtype=dtype)
    form = StepForm(1.0, "softmax", 8.0, True)
    gsa_recurrent_projected(x, lengths, lengths, None, weight, *empty(B, H, M, D, D), HQ, *form)


def empty(B, H, M, K, V):
    return GSAState(torch.zeros(B, H, M, K), torch.zeros(B, H, M, V))


bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
# Every dtype and every way between the passes, but not every combination of them.
FORMS = {
    "the published sizes in bfloat16": (lambda: projection(100, 512, 64, bf16), TRAINED),
    "grouped heads in float16, several segments, none between": (
        lambda: projection(
            5000, 128, 64, fp16, HQ=8, H=2, between="none", swish=False, keep="states"
        ),
        CONTINUED,
    ),
    "128 slots in bfloat16, swish between": (
        lambda: apart(100, 512, 512, 128, bf16, strength=True, state=True, between="swish"),
        CONTINUED,
    ),
    "128 slots in float32, relu between": (
        lambda: apart(100, 512, 512, 128, fp32, strength=True, state=True, between="relu"),
        CONTINUED,
    ),
    "grouped heads of odd widths in float16, packed, relu_squared between": (
        lambda: apart(
            100, 40, 72, 20, fp16, HQ=4, H=2, packed=True, strength=True, between="relu_squared"
        ),
        CONTINUED,
    ),
    "a few tokens of a projection in float32, no backward": (
        lambda: projection(20, 64, 16, fp32, HQ=4, H=2, keep="nothing"),
        TRAINED - {"slots_bwd_kernel"},
    ),
    "a few tokens from a state, no backward": (
        lambda: apart(20, 64, 64, 64, bf16, state=True, keep="nothing"),
        CONTINUED - {"slots_bwd_kernel"},
    ),
    **{
        f"a step in {str(dtype).removeprefix('torch.')}": (
            lambda dtype=dtype: (
                layer(1, 4, 4, 64, 512, dtype),
                step(1, 4, 4, 64, 512, 512, dtype),
            ),
            NORMED,
        )
        for dtype in (bf16, fp16, fp32)
    },
    "a step with others between": (
        lambda: [layer(1, 4, 4, 64, 512, bf16, between=name) for name in BETWEEN],
        NORMED,
    ),
    "a step of other sizes": (
        lambda: (
            layer(1, 32, 8, 32, 128, bf16, constant=True, norm=False, swish=False),
            step(2, 4, 2, 20, 40, 72, bf16, gate=False, strength=True),
            step(2, 4, 2, 128, 512, 32, fp32, strength=True),
            step(1, 1, 1, 16, 32, 32, fp32),
        ),
        STEPPED,
    ),
    "a few tokens one after another": (lambda: tokens(2, 5, 4, 4, 64, 256, bf16), NORMED),
}


@contextmanager
def compiling(kernels):
    """Check that these kernels compile and that none takes too much shared memory."""
    with compile_only() as compiled, keep_kernels() as launched:
        yield compiled
    names = {name.rsplit(".")[-1] for name in compiled}
    assert names >= kernels, names
    shared = [(kernel.metadata.name, kernel.metadata.shared) for kernel in launched]
    too_large = [(name, size) for name, size in shared if size > SHARED_MEMORY]
    assert not too_large, f"bytes of shared memory are too many: {too_large}"


def compile_form(name):
    launch, kernels = FORMS[name]
    with compiling(kernels):
        launch()


def small(T, B=1):
    projection(T, 32, 16, bf16, B=B, between="none")


def compile_lengths():
    """Launch few tokens, one segment and several; then no length or batch compiles anything."""
    with compile_only(keys_only=True) as compiled:
        for T in (20, 100, 5000):
            small(T)
        known = len(compiled)
        assert known, "kernels are seen"
        for B, T in ((1, 2000), (3, 4096), (2, 1), (2, 1500), (5, 1777), (1, 70_001)):
            small(T, B)
        assert not compiled[known:], f"a new length compiled {compiled[known:]}"


def compile_batches():
    """Launch a step for a batch with the widest tiles; then no other batch compiles anything."""
    with compile_only(keys_only=True) as compiled:
        layer(64, 4, 4, 64, 512, bf16)
        known = len(compiled)
        for B in (65, 128, 200):
            layer(B, 4, 4, 64, 512, bf16)
        tokens(64, 5, 4, 4, 64, 512, bf16)
        known = len(compiled)
        tokens(65, 32, 4, 4, 64, 512, bf16)
        assert not compiled[known:], f"another batch compiled {compiled[known:]}"


def compile_at_the_same_time():
    """Compile a form ahead of its first call; then that call compiles nothing."""
    import triton

    if not hasattr(triton, "AsyncCompileMode"):
        return  # Triton 3.4 compiles in one thread
    launch = partial(layer, 1, 4, 4, 16, 32, bf16)
    with compile_only() as compiled:
        compile_ahead("a form", launch)
        known = len(compiled)
        assert known, "compilations are seen"
        launch()
        assert not compiled[known:], f"the first call compiled {compiled[known:]}"


LAWS = {
    "lengths": compile_lengths,
    "batches": compile_batches,
    "at the same time": compile_at_the_same_time,
}


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_and_once_for_all():
    run_compiling(__file__, Path(__file__).parent / "children" / "compile_gla.py")


if __name__ == "__main__":
    compile_apart(lambda name: LAWS.get(name, partial(compile_form, name))(), [*FORMS, *LAWS])
