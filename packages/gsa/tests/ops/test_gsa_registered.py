"""The registered ops: their contract, compiled graphs, and kernels that read a projection.

Kernels run in the interpreter, or on a GPU.
"""

import pytest
import torch
import torch.nn.functional as F
from mezzo_core.testing import assert_close, grads
from mezzo_gsa.ops.gsa import GSAState, chunk_gsa, chunk_gsa_projected, op
from mezzo_gsa.ops.gsa.arguments import Form
from mezzo_gsa.ops.gsa.chunked import chunked_gsa
from mezzo_gsa.ops.gsa.request import Tensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = {torch.float16: 5e-3, torch.bfloat16: 5e-3, torch.float32: 1e-5}
gpu = pytest.mark.gpu


def normal(*shape, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draws).to(DEVICE)


def draw(B, T, HQ=4, H=2, D=12, M=10, *, dtype=torch.float32, state=False):
    """Draw a projection and initial memories: `state` rows, B if True, none if False."""
    S = B if state is True else state
    x = normal(B, T, (HQ + 2 * H) * D + H * M).to(dtype)
    k0, v0 = (normal(S, H, M, D, seed=5 + i) if state else None for i in range(2))
    return {"x": x, "k0": k0, "v0": v0}, {"num_heads": HQ, "num_kv_heads": H, "num_slots": M}


def split(x, heads):
    return Form(1.0, "softmax", "nothing", **heads).split(x)


def call(function, k0=None, v0=None, **x):
    """Call an op with the memories apart; return its three results."""
    out, last = function(**x, initial_state=None if k0 is None else GSAState(k0, v0))
    return out, *last


def definition(
    x, k0, v0, heads, *, dtype, damping, swish, scale=1.0, between="softmax", cu_seqlens
):
    """Run the reference on the parts of a projection with every number in one dtype."""
    q, k, v, logits = split(x.to(dtype), heads)
    if swish:
        q, k, v = (F.silu(part) for part in (q, k, v))
    g = F.logsigmoid(logits) / damping
    S = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    zeros = (x.new_zeros(S, *g.shape[2:], part.shape[3], dtype=dtype) for part in (k, v))
    state = GSAState(*zeros) if k0 is None else GSAState(k0.to(dtype), v0.to(dtype))
    out, last = chunked_gsa(q, k, v, g, -torch.expm1(g), scale, between, state, cu_seqlens)
    return out, *last


def check(inputs, heads, *, damping=8.0, swish=True, cu_seqlens=None, truth=torch.float64, **form):
    """Compare results and gradients by the numerics rule; the gradient of x part by part."""
    dtype, has_state = inputs["x"].dtype, inputs["k0"] is not None
    form = {"damping": damping, "swish": swish, "cu_seqlens": cu_seqlens, **form}
    (B, T), D = inputs["x"].shape[:2], split(inputs["x"], heads).q.shape[3]
    dout = normal(B, T, heads["num_heads"], D, seed=20).to(dtype)
    last = [normal(*inputs[n].shape, seed=21) if has_state else None for n in ("k0", "v0")]

    def run(fn, out, wide):
        douts = (dout.to(out), *(x if x is None else x.to(wide) for x in last))
        results, found = grads(fn, inputs, douts)
        parts = split(found.pop("x"), heads)
        named = dict(zip(("out", "final k", "final v", *"qkvg"), (*results, *parts), strict=True))
        return {**named, **(found if has_state else {})}

    def eager(to):
        fn = lambda **x: definition(**x, heads=heads, dtype=to, **form)  # noqa: E731
        return run(fn, to, to)

    ours = run(
        lambda **x: call(chunk_gsa_projected, **x, **heads, **form, impl="triton"),
        dtype, torch.float32,
    )  # fmt: skip
    low = {} if dtype == torch.float32 else eager(dtype)
    for name, expected in eager(truth).items():
        rtol = 8e-3 if name == "g" and dtype != torch.float32 else LOW[dtype]
        factor = 2 if name == "out" else 3  # memories are sums, as gradients are
        assert_close(
            name, ours[name], expected, rtol=rtol, low=low.get(name), factor=factor, atol=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("swish", [True, False])
def test_a_projection_equals_the_reference(swish, dtype):
    check(*draw(2, 66, dtype=dtype, state=True), swish=swish, damping=3.0, scale=0.3)


def test_a_projection_with_a_head_for_each_query_equals_the_reference():
    check(*draw(1, 40, 2, 2, M=5), between="relu", scale=0.3)


def test_sequences_packed_in_a_projection_equal_the_reference():
    borders = torch.tensor([0, 30, 30, 31, 70], device=DEVICE)
    check(*draw(1, 70, state=4), cu_seqlens=borders, between="swish")


def test_a_projection_that_is_part_of_a_wider_tensor_is_read_in_place():
    (inputs, heads) = draw(2, 20)
    wide = normal(2, 25, 200, seed=3)
    strided = wide[:, 2:22, 16 : 16 + inputs["x"].shape[2]]
    strided.copy_(inputs["x"])
    ours, ref = (
        call(chunk_gsa_projected, x=x, **heads, impl="triton") for x in (strided, inputs["x"])
    )
    assert all(torch.equal(x, y) for x, y in zip(ours, ref, strict=True))


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("HQ", [2, 4])
def test_single_tokens_of_a_batch_have_the_gradients_of_the_reference(HQ, is_turned):
    inputs, heads = draw(1 if is_turned else 3, 3 if is_turned else 1, HQ)
    if is_turned:  # (3, 1, W) again; torch calls it contiguous, with strides (W, 3 W, 1)
        inputs["x"] = inputs["x"].transpose(0, 1)
    check(inputs, heads)


def test_a_gradient_comes_through_the_final_state_alone():
    inputs, heads = draw(1, 20)
    douts = (None, *(normal(1, 2, 10, 12, seed=20 + i) for i in range(2)))
    found, truth = (
        grads(
            lambda i=impl, **x: call(chunk_gsa_projected, **x, **heads, impl=i),
            {"x": inputs["x"]},
            douts,
        )[1]
        for impl in ("triton", "reference")
    )
    assert_close("dx", found["x"], truth["x"], rtol=1e-5)


def test_kept_memories_and_repeats_change_no_bit():
    inputs, heads = draw(1, 70, state=True)
    douts = (torch.ones(1, 70, 4, 12, device=DEVICE), *(normal(1, 2, 10, 12, seed=9),) * 2)
    runs = []
    for keep_states in (False, False, True):
        fn = lambda k=keep_states, **x: call(  # noqa: E731
            chunk_gsa_projected, **x, **heads, keep_states=k, impl="triton"
        )
        results, found = grads(fn, inputs, douts)
        runs.append([*results, *found.values()])
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))


WITHOUT_AOT = ("test_schema", "test_autograd_registration", "test_faketensor")
"""Without AOTAutograd, which traces the backward together with the forward."""


def opcheck(tensors, form, keep):
    """Check the op with and without a later backward, and its backward."""
    nothing = form._replace(keep="nothing")
    torch.library.opcheck(op.gsa, (*tensors, *nothing), test_utils=WITHOUT_AOT)
    form = form._replace(keep=keep)
    for x in tensors:
        if x is not None and x.is_floating_point():
            x.requires_grad_()
    torch.library.opcheck(op.gsa, (*tensors, *form))
    still = [x if x is None else x.detach() for x in tensors]
    out, k, v, *saved = op.gsa(*still, *form)
    last = (None, None) if tensors.k0 is None else (k, v)
    its = (torch.ones_like(out), *last, saved, *still, *form)
    torch.library.opcheck(op.gsa_bwd, its, test_utils=WITHOUT_AOT)


CONTRACTS = [(False, True, "states"), (True, False, "weights")]


@pytest.mark.parametrize(("packed", "state", "keep"), CONTRACTS)
def test_the_registered_op_keeps_its_contract(packed, state, keep):
    x, heads = draw(1, 5, 2, 1, state=state)
    q, k, v, g = (part.contiguous() for part in split(x.pop("x"), heads))
    s = torch.ones_like(g) if state else None
    borders = torch.tensor([0, 3, 5], device=DEVICE) if packed else None
    tensors = Tensors(q=q, k=k, v=v, g=-g.abs(), s=s, **x, cu_seqlens=borders)
    opcheck(tensors, Form(0.5, "softmax", keep), keep)


@pytest.mark.parametrize(("packed", "state", "keep"), CONTRACTS)
def test_the_registered_op_on_a_projection_keeps_its_contract(packed, state, keep):
    inputs, heads = draw(1, 5, 2, 1, state=state)
    borders = torch.tensor([0, 3, 5], device=DEVICE) if packed else None
    form = Form(0.5, "softmax", keep, 8.0, True, **heads)
    opcheck(Tensors(**inputs, cu_seqlens=borders), form, keep)


def assert_compiles(fn, inputs, douts):
    """Compare a function compiled in one graph with itself, bit for bit."""
    torch._dynamo.reset()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(fn, fullgraph=True, backend=backend)
    (ours, found), (ref, truth) = (grads(f, inputs, douts) for f in (compiled, fn))
    assert all(torch.equal(x, y) for x, y in zip(ours, ref, strict=True))
    assert all(torch.equal(found[name], truth[name]) for name in truth)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.any_shapes
def test_separate_tensors_compile_in_one_graph(packed):
    x, heads = draw(1, 20, 2, 1, state=2 if packed else 1)
    q, k, v, g = split(x.pop("x"), heads)
    inputs = {"q": q, "k": k, "v": v, "g": -g.abs(), "s": g.sigmoid(), **x}
    borders = torch.tensor([0, 13, 20], device=DEVICE) if packed else None
    assert_compiles(
        lambda **x: call(chunk_gsa, **x, cu_seqlens=borders, impl="triton"),
        inputs,
        (torch.ones_like(q), normal(*x["k0"].shape), normal(*x["v0"].shape)),
    )


@pytest.mark.any_shapes
def test_a_projection_compiles_in_one_graph():
    inputs, heads = draw(1, 20, 2, 1)
    assert_compiles(
        lambda **x: call(chunk_gsa_projected, **x, **heads, impl="triton"),
        inputs,
        (torch.ones(1, 20, 2, 12, device=DEVICE), None, None),
    )


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_at_the_papers_widths(dtype):
    inputs, heads = draw(2, 4096, 4, 4, 512, 64, dtype=dtype)
    check(inputs, heads, truth=torch.float32, scale=512**-0.5)


@gpu
def test_on_a_gpu_grouped_and_continued_in_bfloat16():
    inputs, heads = draw(2, 700, 8, 2, 128, 64, dtype=torch.bfloat16, state=True)
    check(inputs, heads, scale=128**-0.5)


@gpu
@pytest.mark.any_shapes
def test_on_a_gpu_compiled_in_bfloat16():
    inputs, heads = draw(2, 300, 4, 4, 64, 64, dtype=torch.bfloat16)
    dout = torch.ones(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
    assert_compiles(
        lambda **x: call(chunk_gsa_projected, **x, **heads, impl="triton"),
        inputs,
        (dout, None, None),
    )
