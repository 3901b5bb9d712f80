import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.ops.attention import attention, sdpa
from mezzo_core.ops.online_softmax import merge
from mezzo_core.positions import alibi_slopes
from mezzo_core.testing import assert_close, grads

from .attention_inputs import borders, problem

some = settings(max_examples=settings().max_examples // 5)


def compare(options, *, impl, inputs, dout, rtol=1e-5):
    """Output and gradients of a backend against the reference."""
    # A query that sees one key has dq = 0, which kernels meet to rounding only.
    for name, got, expected in both(options, impl, inputs, dout):
        assert_close(name, got, expected, rtol=rtol, atol=1e-6)


def both(options, impl, inputs, dout):
    out, gradients = grads(lambda **x: attention(**x, **options, impl=impl).out, inputs, dout)
    ref, expected = grads(lambda **x: attention(**x, **options, impl="reference").out, inputs, dout)
    yield "out", out, ref
    for name in inputs:
        yield f"d{name}", gradients[name], expected[name]


def by_hand(q, k, v, *, scale, sees, slopes=None, q_positions=None, k_positions=None):
    """One query of one head at a time, over a list of the keys that it sees."""
    B, T, HQ, _ = q.shape
    G = HQ // k.shape[2]
    out = q.new_zeros(B, T, HQ, v.shape[-1])
    lse = q.new_full((B, T, HQ), float("-inf"))
    for b in range(B):
        for t in range(T):
            t_at = t if q_positions is None else int(q_positions[b, t])
            at = range(k.shape[1]) if k_positions is None else k_positions[b].tolist()
            seen = [s for s, s_at in enumerate(at) if s_at >= 0 and sees(t_at, s_at)]
            for h in range(HQ) if seen else ():
                scores = scale * k[b, seen, h // G] @ q[b, t, h]
                if slopes is not None:
                    scores -= slopes[h] * torch.tensor([abs(t_at - at[s]) for s in seen])
                out[b, t, h] = scores.softmax(0) @ v[b, seen, h // G]
                lse[b, t, h] = scores.logsumexp(0)
    return out, lse


# --- The reference is the definition -----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sees"),
    [
        ({}, lambda t, s: s <= t),
        ({"causal": False}, lambda t, s: True),
        ({"window_size": 1}, lambda t, s: s == t),
        ({"window_size": 3}, lambda t, s: 0 <= t - s < 3),
        ({"window_size": 100}, lambda t, s: s <= t),
        ({"causal": False, "window_size": 2}, lambda t, s: t - s < 2),
        ({"scale": 0.3}, lambda t, s: s <= t),
    ],
)
def test_reference_is_softmax_over_the_visible_keys(options, sees):
    x, _ = problem(HQ=4, H=2, V=5, dtype=torch.float64)
    got = attention(**x, **options, return_lse=True, impl="reference")
    out, lse = by_hand(**x, scale=options.get("scale", 8**-0.5), sees=sees)
    torch.testing.assert_close(got.out, out)
    torch.testing.assert_close(got.lse, lse)


@pytest.mark.parametrize("formula", ["press", "olmo"])
@pytest.mark.parametrize("causal", [True, False])
def test_alibi_lowers_scores_by_slope_times_distance(formula, causal):
    x, _ = problem(HQ=6, H=3, dtype=torch.float64)
    slopes = alibi_slopes(6, formula).double()
    got = attention(**x, causal=causal, alibi_slopes=slopes, return_lse=True, impl="reference")
    out, lse = by_hand(**x, scale=8**-0.5, sees=lambda t, s: s <= t or not causal, slopes=slopes)
    torch.testing.assert_close(got.out, out)
    torch.testing.assert_close(got.lse, lse)


@pytest.mark.parametrize("slopes", [None, alibi_slopes(2).double()])
def test_positions_replace_the_order_of_tokens(slopes):
    x, _ = problem(T=3, S=6, HQ=2, dtype=torch.float64)
    q_positions = torch.tensor([[4, 0, 9], [2, 5, 1]])
    k_positions = torch.tensor([[-1, 0, 3, 4, 2, 8], [7, -5, -1, 6, 5, 2]])
    where = {"q_positions": q_positions, "k_positions": k_positions}
    got = attention(
        **x, **where, window_size=4, alibi_slopes=slopes, return_lse=True, impl="reference"
    )
    out, lse = by_hand(**x, **where, scale=8**-0.5, sees=lambda t, s: 0 <= t - s < 4, slopes=slopes)
    # Row 1's last query, at position 1, comes before every key.
    assert lse[1, 2].isinf().all()
    torch.testing.assert_close(got.out, out)
    torch.testing.assert_close(got.lse, lse)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_may_be_as_far_apart_as_their_dtype_allows(causal, dtype):
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    x, _ = problem(T=4, S=5, HQ=2, dtype=torch.float64)
    where = {
        "q_positions": torch.tensor([[least, most, 0, 3]], dtype=dtype).expand(2, -1),
        "k_positions": torch.tensor([[1, most, 0, least, most - 2]], dtype=dtype).expand(2, -1),
    }
    got = attention(**x, **where, causal=causal, window_size=3, return_lse=True, impl="reference")
    out, lse = by_hand(
        **x, **where, scale=8**-0.5, sees=lambda t, s: t - s < 3 and (t >= s or not causal)
    )
    torch.testing.assert_close(got.out, out)
    torch.testing.assert_close(got.lse, lse)


def test_lse_is_the_logsumexp_of_the_scores():
    x, _ = problem(T=9)
    got = attention(**x, return_lse=True)
    scores = torch.einsum("bthd,bshd->bths", x["q"], x["k"]) * 8**-0.5
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)[:, None]
    expected = scores.masked_fill(hidden, float("-inf")).logsumexp(-1)
    assert got.lse.dtype == torch.float32
    assert_close("lse", got.lse, expected, rtol=1e-5)
    assert attention(**x).lse is None


def test_gradients_of_the_reference_pass_gradcheck():
    x, _ = problem(B=1, T=4, S=5, HQ=2, H=1, D=3, V=2, dtype=torch.float64)
    # The first query sees nothing: its gradients must be zeros, not NaN.
    where = {"q_positions": torch.tensor([[0, 2, 3, 7]]), "k_positions": torch.arange(1, 6)[None]}
    slopes = torch.tensor([0.5, 0.1], dtype=torch.float64)

    def op(q, k, v):
        out, lse = attention(
            q, k, v, **where, window_size=3, alibi_slopes=slopes, return_lse=True, impl="reference"
        )
        return out, lse[:, 1:]

    assert torch.autograd.gradcheck(op, [t.requires_grad_() for t in x.values()])


def test_a_query_that_sees_nothing_gets_zero_and_no_gradient():
    x, dout = problem(B=1, T=2, S=3, HQ=2, H=1)
    where = {"q_positions": torch.tensor([[5, 1]]), "k_positions": torch.tensor([[-1, 2, 4]])}
    for impl in ("reference", "sdpa", "blocked", "auto"):
        out, gradients = grads(lambda i=impl, **t: attention(**t, **where, impl=i).out, x, dout)
        assert torch.equal(out[:, 1], torch.zeros_like(out[:, 1]))
        assert torch.equal(gradients["q"][:, 1], torch.zeros_like(out[:, 1]))
        assert all(gradient.isfinite().all() for gradient in gradients.values())
    lse = attention(**x, **where, return_lse=True).lse
    assert torch.equal(lse[:, 1], torch.full((1, 2), float("-inf")))


# --- Properties of whatever "auto" picks -------------------------------------------------------


OPTIONS = [
    {},
    {"causal": False},
    {"window_size": 1},
    {"window_size": 5},
    {"window_size": 500},
    {"alibi_slopes": alibi_slopes(4)},
    {"alibi_slopes": alibi_slopes(4, "olmo"), "window_size": 6, "causal": False},
    {"scale": 1.0},
]


@pytest.mark.parametrize("T", [1, 63, 100])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("impl", ["auto", "sdpa", "blocked"])
def test_backends_equal_the_reference(options, T, impl):
    for H in (4, 2, 1):
        inputs, dout = problem(T=T, H=H)
        compare(options, impl=impl, inputs=inputs, dout=dout)


def test_values_may_be_wider_than_keys():
    inputs, dout = problem(T=20, H=2, V=24)
    compare({}, impl="auto", inputs=inputs, dout=dout)
    compare({"window_size": 3}, impl="auto", inputs=inputs, dout=dout)


def test_inputs_need_not_be_contiguous():
    inputs, dout = problem(T=33, H=2)
    strided = {
        name: torch.stack([x, torch.full_like(x, float("nan"))], dim=-1).transpose(1, 2)[..., 0]
        for name, x in inputs.items()
    }
    strided = {name: x.transpose(1, 2) for name, x in strided.items()}
    assert not strided["q"].is_contiguous()
    for options in ({}, {"window_size": 4}):
        for (name, got, _), (_, _, expected) in zip(
            both(options, "auto", strided, dout),
            both(options, "reference", inputs, dout),
            strict=True,
        ):
            assert_close(name, got, expected, rtol=1e-5, atol=1e-6)


lengths_of_sequences = st.lists(st.sampled_from([0, 1, 2, 7, 30]), min_size=1, max_size=5)


@some
@given(
    lengths_of_sequences.filter(any),
    st.sampled_from([{}, {"window_size": 3}, {"alibi_slopes": alibi_slopes(4)}, {"causal": False}]),
    st.sampled_from(["auto", "reference", "blocked"]),
)
def test_packed_sequences_do_not_see_each_other(lengths, options, impl):
    x, _ = problem(B=1, T=sum(lengths), H=2)
    cu_seqlens = torch.cat([borders(lengths), borders(lengths)[-1:]])  # padded with the total
    packed = attention(**x, **options, cu_seqlens=cu_seqlens, return_lse=True, impl=impl)
    fast = attention(**x, **options, cu_seqlens=cu_seqlens, impl=impl).out
    parts = [t.split(lengths, dim=1) for t in x.values()]
    alone = [
        attention(*part, **options, return_lse=True)
        for part in zip(*parts, strict=True)
        if part[0].shape[1]
    ]
    out, lse = (torch.cat(field, dim=1) for field in zip(*alone, strict=True))
    assert_close("out", packed.out, out, rtol=1e-5)
    assert_close("out without lse", fast, out, rtol=1e-5)
    assert_close("lse", packed.lse, lse, rtol=1e-5)


@pytest.mark.parametrize("options", OPTIONS[:1] + OPTIONS[2:6])
def test_a_change_leaves_the_past_bit_equal(options):
    x, _ = problem(T=40)
    before = attention(**x, **options).out
    for t in (0, 1, 20, 39):
        changed = {name: tensor.clone() for name, tensor in x.items()}
        for tensor in changed.values():
            tensor[:, t:] = torch.randn_like(tensor[:, t:])
        after = attention(**changed, **options).out
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t:], before[:, t:])


@pytest.mark.parametrize("most", [sdpa.MOST_ROWS, 2])
def test_a_row_does_not_depend_on_its_batch(most, monkeypatch):
    monkeypatch.setattr(sdpa, "MOST_ROWS", most)
    x, _ = problem(B=3, T=21, H=2)
    whole = attention(**x).out
    for b in range(3):
        alone = attention(**{name: t[b : b + 1] for name, t in x.items()}).out
        assert_close(f"row {b}", alone, whole[b : b + 1], rtol=1e-6)


@some
@given(st.integers(1, 20), st.integers(0, 19), st.integers(1, 25))
def test_two_halves_of_the_keys_merge_by_lse_into_the_whole(T, cut, W):
    cut = min(cut, T)
    x, dout = problem(T=T, H=2)

    def halves(q, k, v):
        """Merge by the lse, through which a gradient runs too."""
        places = torch.arange(T)[None]
        parts = [
            attention(
                q,
                k[:, keys],
                v[:, keys],
                window_size=W,
                q_positions=places,
                k_positions=places[:, keys],
                return_lse=True,
            )
            for keys in (slice(0, cut), slice(cut, T))
        ]
        return merge(*zip(*parts, strict=True))[0]

    out, gradients = grads(halves, x, dout)
    ref, expected = grads(lambda **t: attention(**t, window_size=W, impl="reference").out, x, dout)
    assert_close("out", out, ref, rtol=1e-5)
    for name in x:
        assert_close(f"d{name}", gradients[name], expected[name], rtol=1e-5, atol=1e-6)


def test_no_tokens_give_no_outputs():
    x, _ = problem()
    none = {name: tensor[:, :0] for name, tensor in x.items()}
    assert attention(**none).out.shape == (2, 0, 4, 8)
    got = attention(x["q"], none["k"], none["v"], causal=False, return_lse=True)
    assert torch.equal(got.out, torch.zeros(2, 7, 4, 8))
    assert got.lse.isinf().all()


@pytest.mark.parametrize("T", [0, 7])
@pytest.mark.parametrize("B", [0, 1])
@pytest.mark.parametrize(
    "options",
    [{}, {"window_size": 3}, {"return_lse": True}, {"window_size": 3, "impl": "sdpa"}],
)
def test_gradients_of_no_tokens_and_of_no_rows_are_empty(B, T, options):
    inputs = {name: torch.randn(B, T, 4, 8) for name in ("q", "k", "v")}
    _, gradients = grads(lambda **x: attention(**x, **options).out, inputs, torch.ones(B, T, 4, 8))
    assert [gradients[name].shape for name in inputs] == [(B, T, 4, 8)] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"window_size": 9}, {"alibi_slopes": alibi_slopes(4)}])
def test_other_dtypes_stay_close_to_float64(dtype, options):
    x, _ = problem(T=50, dtype=dtype)
    got = attention(**x, **options).out
    low = attention(**x, **options, impl="reference").out
    ref = attention(**{name: t.double() for name, t in x.items()}, **options).out
    assert got.dtype == dtype
    assert_close("out", got, ref, low=low, rtol=1e-6 if dtype == torch.float64 else 5e-3)


def test_shapes_are_told_without_memory():
    x, _ = problem(T=300, device="meta")
    for slopes in (None, alibi_slopes(4).to("meta")):
        assert attention(**x, alibi_slopes=slopes).out.shape == x["q"].shape


@pytest.mark.parametrize("impl", ["sdpa", "blocked"])
def test_autocast_does_not_round_alibi_s_bias(impl):
    x, _ = problem(B=1, T=300, D=4)
    wanted = attention(**x, alibi_slopes=alibi_slopes(4), impl="reference").out
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention(**x, alibi_slopes=alibi_slopes(4), impl=impl).out
    assert_close("out", found, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"window_size": 3}, {"return_lse": True}, {"cu_seqlens": borders([3, 0, 7])}]
)
@pytest.mark.any_shapes
def test_attention_compiles_into_one_graph(options):
    x, dout = problem(B=1, T=10, H=2)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    out, gradients = grads(lambda **t: compiled(**t, **options).out, x, dout)
    ref, expected = grads(lambda **t: attention(**t, **options).out, x, dout)
    assert_close("out", out, ref, rtol=1e-6)
    for name in x:
        assert_close(f"d{name}", gradients[name], expected[name], rtol=1e-5, atol=1e-6)


# --- Bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.randn(2, 7, 8)}, ValueError, r"q must be \(B, T, HQ, K\), HQ, K at"),
        ({"k": torch.randn(2, 7, 4, 9)}, ValueError, r"k must be \(2, S, H, 8\)"),
        ({"k": torch.randn(2, 7, 4, 8).double()}, TypeError, "one floating dtype"),
        (
            {"q": torch.ones(2, 7, 4, 0), "k": torch.ones(2, 7, 4, 0)},
            ValueError,
            "HQ, K at least 1",
        ),
        ({"causal": 1}, TypeError, "causal must be True or False, got 1"),
        (
            {"k": torch.randn(2, 7, 3, 8), "v": torch.randn(2, 7, 3, 8)},
            ValueError,
            "must be a multiple of those of k and v, got 4 and 3",
        ),
        (
            {"k": torch.randn(2, 9, 4, 8), "v": torch.randn(2, 9, 4, 8)},
            ValueError,
            "as many keys as queries",
        ),
        ({"q_positions": torch.arange(7)[None]}, ValueError, "together or not at all"),
        ({"cu_seqlens": borders([3, 4])}, ValueError, "one row"),
        ({"impl": "flash"}, ValueError, "'flash' does not support tensors on cpu"),
        ({"impl": "flex"}, ValueError, "can be done by 'reference', 'sdpa'"),
        ({"impl": "sdpa", "return_lse": True}, ValueError, "return_lse=True"),
    ],
)
@pytest.mark.any_shapes
def test_bad_arguments_are_named(changes, error, message):
    """Others are in tests/test_arguments.py."""
    inputs, _ = problem()
    with pytest.raises(error, match=message):
        attention(**{**inputs, **changes})


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "message"),
    [
        (torch.tensor([0, 5]), ValueError, "end at T = 7"),
        (torch.tensor([1, 7]), ValueError, "start at 0"),
        (torch.tensor([0, 5, 3, 7]), ValueError, "never decrease"),
        (torch.tensor([0, 2**31 - 1, -2, 7], dtype=torch.int32), ValueError, "never decrease"),
        (torch.tensor([0, 2**63 - 1, -2, 7]), ValueError, "never decrease"),
        (torch.tensor([7]), ValueError, "S >= 1"),
        (torch.tensor([0.0, 7.0]), TypeError, "int32 or int64"),
    ],
)
@pytest.mark.any_shapes
def test_bad_borders_are_named(cu_seqlens, error, message):
    inputs, _ = problem(B=1)
    with pytest.raises(error, match=message):
        attention(**inputs, cu_seqlens=cu_seqlens)


def test_borders_and_positions_exclude_each_other():
    inputs, places = problem(B=1)[0], torch.arange(7)[None]
    with pytest.raises(ValueError, match="exclude each other"):
        attention(**inputs, cu_seqlens=borders([7]), q_positions=places, k_positions=places)


def test_every_argument_is_documented():
    for name in inspect.signature(attention).parameters:
        assert f"        {name}: " in attention.__doc__
