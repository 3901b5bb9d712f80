"""Attention at its edges: odd scales, NaN and infinities, long rows, transforms."""

import math
import re
from itertools import product
from pathlib import Path

import pytest
import torch
from mezzo_core.ops.attention import attention, blocked
from mezzo_core.ops.attention.request import Request
from mezzo_core.positions import alibi_slopes
from mezzo_core.testing import assert_close, grads

from .attention_inputs import borders, problem

# --- Slopes of any precision -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("impl", ["auto", "reference", "sdpa", "blocked"])
def test_slopes_of_another_precision_are_taken_as_they_are(impl, dtype):
    """Slope times distance, up to 100, has more digits than half precision."""
    inputs, _ = problem(T=300)
    slopes = torch.tensor([0.34, 0.1, 0.03, 0.01]).to(dtype)
    out, lse = attention(**inputs, alibi_slopes=slopes, impl=impl, return_lse=impl != "sdpa")
    wide = {name: x.double() for name, x in inputs.items()}
    expected = by_hand(**wide, scale=8**-0.5, window_size=300, slopes=slopes.double())
    assert_close("out", out, expected, rtol=1e-5)
    assert lse is None or lse.dtype == torch.float32


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_slopes_keep_their_digits_beside_inputs_of_half_precision(impl):
    slopes = torch.tensor([1 / 300, 0.003])
    found = [
        attention(*torch.zeros(3, 1, 300, 2, 4, dtype=dtype), alibi_slopes=slopes, impl=impl,
                  return_lse=True).lse
        for dtype in (torch.bfloat16, torch.float32)
    ]  # fmt: skip
    assert_close("lse", *found, rtol=1e-6)


@pytest.mark.parametrize("impl", ["reference", "sdpa", "blocked"])
def test_slopes_have_no_gradient(impl):
    inputs, _ = problem(T=5)
    q, k, v = (x.detach() for x in inputs.values())
    slopes = alibi_slopes(4).requires_grad_()
    assert not attention(q, k, v, alibi_slopes=slopes, impl=impl).out.requires_grad


# --- Long rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_a_block_multiplies_no_keys_beyond_its_window(causal):
    """Also where a state goes on: its keys lie in a ring, and hidden ones behind the others."""
    T, W = 700, 100
    inputs, _ = problem(B=1, T=T)
    old = W  # tokens of the state
    ring = torch.arange(old).roll(37)
    order = torch.cat([ring, torch.arange(old, T), torch.arange(50)])
    k_positions = torch.cat([order[:T], torch.full((50,), -1)])[None]
    q = inputs["q"][:, old:]
    k, v = (inputs[name][:, order] for name in "kv")
    places = {"q_positions": torch.arange(old, T)[None], "k_positions": k_positions}
    options = {"causal": causal, "window_size": W}
    got = attention(q, k, v, **options, **places, impl="blocked").out
    assert_close("out", got, attention(**inputs, **options).out[:, old:], rtol=1e-5)
    request = Request(q, k, v, causal, W, None, 1.0, None, **places, return_lse=True)
    read = [block.keys for block in blocked._blocks(request)]
    assert read[0].start == 0
    if causal:
        assert all(keys.stop - keys.start <= W + blocked.BLOCK for keys in read[1:])
    assert max(keys.stop for keys in read) == T


def test_values_that_are_all_alike_leave_queries_no_gradient_in_half_precision():
    """Each score's gradient is the difference of two equal products, which must be exact."""
    torch.manual_seed(0)
    q, k, dout = (torch.randn(1, 9, 2, 64).bfloat16() for _ in range(3))
    v = torch.randn(1, 1, 2, 64).bfloat16().expand(1, 9, 2, 64)
    q.requires_grad_()
    out = attention(q, k, v, impl="blocked").out
    assert torch.equal(out, v)
    assert torch.autograd.grad(out, q, dout)[0].abs().max() < 1e-5


def test_gradients_of_keys_are_summed_over_blocks_in_float32():
    q, (k, v) = torch.zeros(1, 896, 1, 4).bfloat16(), torch.zeros(2, 1, 1, 1, 4).bfloat16()
    dout = torch.full((1, 896, 1, 4), 1 + 2**-7).bfloat16()
    inputs, options = {"q": q, "k": k, "v": v}, {"causal": False, "impl": "blocked"}
    _, found = grads(lambda **x: attention(**x, **options).out, inputs, dout)
    assert found["v"].tolist() == [[[[904.0] * 4]]]


# --- Any finite scale --------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [-0.7, 0, 0.0, -0.0, 1e-30, 3])
@pytest.mark.parametrize("impl", ["auto", "reference", "sdpa", "blocked"])
@pytest.mark.parametrize("options", [{}, {"window_size": 3}, {"alibi_slopes": alibi_slopes(4)}])
@pytest.mark.any_shapes
def test_a_scale_may_be_zero_or_negative(scale, impl, options):
    inputs, dout = problem(T=9, H=2)
    wide = {name: x.double() for name, x in inputs.items()}
    slopes = options.get("alibi_slopes")
    out, gradients = grads(
        lambda **x: attention(**x, **options, scale=scale, impl=impl).out, inputs, dout
    )
    expected, slow = grads(
        lambda q, k, v: by_hand(q, k, v, scale, options.get("window_size", 9), slopes),
        wide,
        dout.double(),
    )
    assert_close("out", out, expected, rtol=1e-5)
    for name in inputs:
        assert_close(f"d{name}", gradients[name], slow[name], rtol=1e-4, atol=1e-6)


def by_hand(q, k, v, scale, window_size, slopes):
    """Scale, then mask."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance
    scores = scores.masked_fill((distance < 0) | (distance >= window_size), float("-inf"))
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)


# --- What is masked is selected, not multiplied ------------------------------------------------

ISOLATED = [
    {},
    {"window_size": 5},
    {"alibi_slopes": alibi_slopes(4)},
    {"cu_seqlens": borders([60, 0, 1, 89])},
    {"cu_seqlens": borders([60, 90]), "causal": False},
    {
        "q_positions": torch.arange(149, -1, -1)[None],
        "k_positions": torch.arange(149, -1, -1)[None],
    },
]


@pytest.mark.parametrize("options", ISOLATED)
@pytest.mark.parametrize("impl", ["auto", "reference", "sdpa", "blocked", "compiled"])
@pytest.mark.any_shapes
def test_a_lost_token_reaches_the_queries_that_see_it_alone(impl, options):
    inputs, _ = problem(B=2 if "cu_seqlens" not in options else 1, T=150, H=2)
    run = attention
    if impl == "compiled":
        torch._dynamo.reset()
        run = torch.compile(attention, fullgraph=True, backend="aot_eager")
    call = {**options, "impl": "auto" if impl == "compiled" else impl}
    clean = run(**inputs, **call).out
    bad_ones = (math.nan, math.inf, 1e38)  # the last: finite, but not its products
    for name, bad, t in product("qkv", bad_ones, (0, 70, 149)):
        spoiled = {**inputs, name: inputs[name].clone()}
        spoiled[name][0, t, -1, 3] = bad
        out = run(**spoiled, **call).out
        sees = torch.arange(150) == t if name == "q" else seen_by(t, options)
        hit = torch.zeros(len(out), 150, dtype=torch.bool)
        hit[0] = sees
        assert torch.equal(out[~hit], clean[~hit]), (name, bad, t)
        if math.isnan(bad):
            assert out[hit].flatten(1).isnan().any(1).all(), (name, t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", ["auto", "reference", "sdpa", "blocked", "compiled"])
@pytest.mark.any_shapes
def test_a_lost_token_leaves_other_sequences_and_their_gradients_bit_equal(impl, dtype):
    inputs, dout = problem(B=1, T=150, H=2)
    given = {name: x.to(dtype) for name, x in (*inputs.items(), ("dout", dout))}
    run = attention
    if impl == "compiled":
        torch._dynamo.reset()
        run, impl = torch.compile(attention, fullgraph=True, backend="aot_eager"), "auto"
    options = {"cu_seqlens": borders([60, 0, 40, 50]), "alibi_slopes": alibi_slopes(4)}

    def others(dout, **inputs):
        out, found = grads(lambda **x: run(**x, **options, impl=impl).out, inputs, dout)
        return torch.cat(
            [x[:, [*range(60), *range(100, 150)]].flatten() for x in (out, *found.values())]
        )

    clean = others(**given)
    for name in given:
        for bad in (math.nan, math.inf, 1e38):
            spoiled = {**given, name: given[name].clone()}
            spoiled[name][0, 70, -1, 3] = bad
            assert torch.equal(others(**spoiled), clean), f"{bad} in {name}"


def seen_by(t, options):
    """Which of 150 queries see key t."""
    visible = torch.ones(150, 150, dtype=torch.bool)
    places = options.get("q_positions", torch.arange(150)[None])[0]
    distance = places[:, None] - places
    if options.get("causal", True):
        visible &= distance >= 0
    visible &= distance < options.get("window_size", 1000)
    if "cu_seqlens" in options:
        ids = torch.repeat_interleave(options["cu_seqlens"].diff())
        visible &= ids[:, None] == ids
    return visible[:, t]


# --- Memory on a CPU ---------------------------------------------------------------------------


def peak(run):
    """Return what a call returns, and by how many bytes the process grew to run it."""
    status = Path("/proc/self/status")

    def size(name):
        return int(re.search(rf"{name}:\s+(\d+) kB", status.read_text())[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak is now the present size
    before = size("VmRSS")
    return run(), size("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    "options", [{"window_size": 64}, {"cu_seqlens": torch.arange(0, 20_001, 100)}]
)
def test_a_long_row_with_a_short_reach_takes_little_memory_on_a_cpu(options):
    T = 20_000
    inputs, dout = problem(B=1, T=T, HQ=1)
    (out, gradients), grown = peak(
        lambda: grads(lambda **x: attention(**x, **options).out, inputs, dout)
    )
    assert grown < T * T / 4  # a mask alone would take T * T bytes, several times
    end = slice(T - 100, T)
    options = {name: x for name, x in options.items() if name != "cu_seqlens"}
    alone = attention(**{name: x[:, end] for name, x in inputs.items()}, **options).out
    # With a window, the first of these see keys before them.
    seen = slice(63 if options else 0, None)
    assert_close("out", out[:, end][:, seen], alone[:, seen], rtol=1e-5)
    assert all(x.isfinite().all() for x in gradients.values())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_measure_of_memory_sees_a_mask():
    inputs, _ = problem(B=1, T=6000, HQ=1)  # a mask too large for memory that was freed before
    _, grown = peak(lambda: attention(**inputs, window_size=64, impl="sdpa"))
    assert grown > 6000 * 6000


# --- Transforms --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"window_size": 3}, {"impl": "blocked"}])
def test_the_gradient_of_torch_func_is_that_of_autograd(options):
    inputs, dout = problem(T=9, H=2)
    _, expected = grads(lambda **x: attention(**x, **options).out, inputs, dout)

    def loss(k):
        return (attention(inputs["q"], k, inputs["v"], **options).out * dout).sum()

    found = torch.func.grad(loss)(inputs["k"])
    assert_close("dk", found, expected["k"], rtol=1e-5)
    per_row = torch.vmap(lambda q: attention(q[None], q[None], q[None]).out)(inputs["q"])
    assert per_row.shape == (2, 1, 9, 4, 8)


@pytest.mark.parametrize("impl", ["blocked", "sdpa"])
def test_a_second_gradient_of_torch_func_is_refused_rather_than_zero(impl):
    inputs, _ = problem(T=5)
    q, k, v = inputs.values()

    def slope(k):
        return torch.func.grad(lambda x: attention(q, x, v, impl=impl).out.sum())(k).sum()

    with pytest.raises(RuntimeError, match="no second gradient"):
        torch.func.grad(slope)(k)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": -0.4},
        {"window_size": 3},
        {"alibi_slopes": alibi_slopes(4)},
        {"return_lse": True},
    ],
)
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.any_shapes
def test_one_graph_serves_every_length(options, marked):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, **options).out,
        fullgraph=True,
        dynamic=None if marked else True,
        backend="eager",
    )
    for T in (9, 7, 33):
        x = torch.randn(2, T, 4, 8)
        if marked:
            torch._dynamo.mark_dynamic(x, 1)
        with torch.compiler.set_stance("fail_on_recompile" if T != 9 else "default"):
            out = compiled(x, x, x)
        assert_close(f"T = {T}", out, attention(x, x, x, **options).out, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocked_attention_passes_opcheck(dtype):
    inputs, _ = problem(T=130, H=2)
    inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    arguments = (*inputs.values(), True, 5, alibi_slopes(4), 0.3, None, None, None)
    torch.library.opcheck(torch.ops.mezzo.blocked_attention.default, arguments)
