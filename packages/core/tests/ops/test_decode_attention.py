import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.ops.decode_attention import decode_attention
from mezzo_core.testing import assert_close

from .impls import DEVICE, impls

some = settings(max_examples=settings().max_examples // 5)


def problem(lengths, S, HQ=4, H=2, D=32, dtype=torch.float32, seed=0, slopes=False):
    """Random inputs by name, with NaN in the slots that hold no token."""
    draw = torch.Generator().manual_seed(seed)
    B = len(lengths)
    q = torch.randn(B, HQ, D, generator=draw)
    k, v = torch.randn(2, B, S, H, D, generator=draw)
    for row, n in enumerate(lengths):
        k[row, n:] = v[row, n:] = math.nan
    tensors = {"q": q, "k": k, "v": v}
    inputs = {name: x.to(DEVICE, dtype) for name, x in tensors.items()}
    inputs["lengths"] = torch.tensor(lengths, dtype=torch.int64, device=DEVICE)
    inputs["alibi_slopes"] = torch.rand(HQ, generator=draw).to(DEVICE) if slopes else None
    return inputs


def upcast(inputs):
    floats = {name: inputs[name].float() for name in ("q", "k", "v")}
    return {**inputs, **floats}


def by_hand(q, k, v, lengths, alibi_slopes):
    """One query head at a time, over the tokens in the order in which they came."""
    (B, HQ, D), (S, H) = q.shape, k.shape[1:3]
    out = torch.zeros(B, HQ, D, dtype=torch.float64, device=q.device)
    for b in range(B):
        n = int(lengths[b])
        tokens = range(max(n - S, 0), n)
        slots = [p % S for p in tokens]
        for h in range(HQ) if n else ():
            scores = k[b, slots, h // (HQ // H)].double() @ q[b, h].double() / D**0.5
            if alibi_slopes is not None:
                ages = torch.tensor([n - 1 - p for p in tokens], device=q.device)
                scores -= alibi_slopes[h].double() * ages
            out[b, h] = scores.softmax(0) @ v[b, slots, h // (HQ // H)].double()
    return out


@impls
@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize("H", [1, 2, 4])
def test_tokens_are_attended_to_wherever_the_ring_put_them(impl, H, slopes):
    inputs = problem([0, 1, 6, 7, 8, 23], S=7, H=H, slopes=slopes)
    out = decode_attention(**inputs, impl=impl)
    assert_close("out", out, by_hand(**inputs), rtol=1e-6)
    assert not out[0].any()


@some
@given(st.data())
def test_triton_equals_the_reference(data):
    pytest.importorskip("triton")
    S = data.draw(st.integers(1, 600))
    lengths = data.draw(st.lists(st.integers(0, S + 9), min_size=1, max_size=3))
    H, G = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1), (1, 20)]))
    D, slopes = data.draw(st.sampled_from([32, 64, 128])), data.draw(st.booleans())
    seed = data.draw(st.integers(0, 99))
    inputs = problem(lengths, S, H * G, H, D, seed=seed, slopes=slopes)
    expected = decode_attention(**inputs, impl="reference")
    assert_close("out", decode_attention(**inputs, impl="triton"), expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("slopes", [False, True])
def test_triton_in_low_precision_is_as_exact_as_the_reference(slopes, dtype):
    pytest.importorskip("triton")
    inputs = problem([300, 77, 0, 1000], S=513, dtype=dtype, slopes=slopes)
    low = decode_attention(**inputs, impl="reference")
    ref = decode_attention(**upcast(inputs), impl="reference")
    out = decode_attention(**inputs, impl="triton")
    assert out.dtype == dtype
    assert_close("out", out, ref, rtol=5e-3, low=low)


def test_the_number_of_splits_does_not_change_the_result(monkeypatch):
    triton = pytest.importorskip("mezzo_core.ops.decode_attention.triton")
    inputs = problem([700, 65, 0, 3], S=700)
    found = []
    for limit in (1, 2, 4, 64):
        monkeypatch.setattr(triton, "MAX_SPLITS", limit)
        found.append(triton.num_splits(8, 700, 128))
        out = decode_attention(**inputs, impl="triton")
        assert_close(f"{limit} splits", out, by_hand(**inputs), rtol=1e-6)
    assert found == [1, 2, 4, 4]


@pytest.mark.parametrize(
    ("num_heads", "num_slots", "expected"),
    [(16, 4096, 32), (1, 100_000, 64), (1024, 4096, 1), (16, 64, 1), (16, 129, 2), (300, 4096, 1)],
)
def test_splits_fill_the_gpu_and_hold_a_tile_each(num_heads, num_slots, expected):
    triton = pytest.importorskip("mezzo_core.ops.decode_attention.triton")
    assert triton.num_splits(num_heads, num_slots, 64) == expected


@impls
def test_a_row_does_not_depend_on_its_neighbours(impl):
    inputs = problem([40, 513, 9], S=600)
    whole = decode_attention(**inputs, impl=impl)
    for row in range(3):
        alone = {name: x[row : row + 1] for name, x in inputs.items() if x is not None}
        assert_close(f"row {row}", decode_attention(**alone, impl=impl)[0], whole[row], rtol=1e-6)


@impls
def test_strides_do_not_matter(impl):
    inputs = problem([5, 8], S=8)
    expected = decode_attention(**inputs, impl=impl)
    for order in ((0, 2, 1, 3), (3, 1, 2, 0)):
        strided = {x: inputs[x].permute(order).contiguous().permute(order) for x in ("k", "v")}
        assert not strided["k"].is_contiguous()
        out = decode_attention(**{**inputs, **strided}, impl=impl)
        assert_close(f"k and v laid out by {order}", out, expected, rtol=1e-6)
    wide = torch.cat([inputs["q"], inputs["q"]], -1)[..., :32]
    out = decode_attention(**{**inputs, "q": wide}, impl=impl)
    assert_close("a part of wider queries", out, expected, rtol=1e-6)


@impls
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_slopes_may_have_any_strides_and_half_precision(impl, dtype):
    inputs = problem([300, 77], S=300, slopes=True)
    slopes = inputs["alibi_slopes"].to(dtype)
    expected = by_hand(**{**inputs, "alibi_slopes": slopes})
    for laid_out in (slopes, torch.stack([slopes, -slopes], 1)[:, 0]):
        out = decode_attention(**{**inputs, "alibi_slopes": laid_out}, impl=impl)
        assert_close("out", out, expected, rtol=1e-5)


@impls
def test_nothing_to_read_gives_zeros(impl):
    for inputs in (problem([0, 0], S=0), problem([], S=4), problem([0, 0], S=4)):
        out = decode_attention(**inputs, impl=impl)
        assert torch.equal(out, torch.zeros_like(inputs["q"]))


@impls
def test_the_scale_and_int32_lengths_are_taken(impl):
    inputs = problem([3, 8], S=8)
    expected = decode_attention(**{**inputs, "q": inputs["q"] * 0.5}, impl=impl)
    lengths = torch.stack([inputs["lengths"], inputs["lengths"] - 2], 1).int()[:, 0]
    out = decode_attention(**{**inputs, "lengths": lengths}, scale=0.5 * 32**-0.5, impl=impl)
    assert_close("out", out, expected, rtol=1e-6)


def test_large_scores_do_not_overflow():
    pytest.importorskip("triton")
    inputs = problem([300], S=300)
    inputs["q"] = inputs["q"] * 1e4
    for impl in ("reference", "triton"):
        assert_close(impl, decode_attention(**inputs, impl=impl), by_hand(**inputs), rtol=1e-5)


@impls
def test_products_beyond_float16_do_not_overflow(impl):
    inputs = problem([9], S=9, dtype=torch.float16)
    for name in ("q", "k"):
        inputs[name] = inputs[name].sign() * 60
    inputs["k"][:, 4] = inputs["q"][:, 0]  # 32 products of 3,600
    truth = by_hand(**{**inputs, **{name: inputs[name].double() for name in ("q", "k", "v")}})
    assert_close("out", decode_attention(**inputs, impl=impl), truth, rtol=5e-3)


def test_autocast_changes_nothing():
    inputs = problem([5, 3], S=8)
    with torch.autocast(inputs["q"].device.type, torch.bfloat16):
        found = decode_attention(**inputs, impl="reference")
    assert torch.equal(found, decode_attention(**inputs, impl="reference"))


@impls
def test_opcheck(impl):
    inputs = problem([3, 9], S=8, slopes=True)
    arguments = (*inputs.values(), 32**-0.5, impl)
    torch.library.opcheck(torch.ops.mezzo.decode_attention.default, arguments)


@impls
@pytest.mark.any_shapes
def test_compiles_to_one_graph(impl):
    inputs = problem([3, 9], S=8)

    def attend(**inputs):
        return decode_attention(**inputs, impl=impl)

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    assert_close("out", compiled(**inputs), attend(**inputs), rtol=1e-6)


def test_dtypes_that_differ_are_refused():
    """The other bad arguments are in tests/test_arguments.py."""
    inputs = problem([3, 8], S=8)
    inputs["k"] = inputs["k"].bfloat16()
    with pytest.raises(TypeError, match="q, k and v must have one floating dtype"):
        decode_attention(**inputs)


def test_negative_lengths_are_refused_on_a_cpu():
    inputs = {name: x.cpu() for name, x in problem([3, -1], S=8).items() if x is not None}
    with pytest.raises(ValueError, match="lengths must be 0 or more, got -1"):
        decode_attention(**inputs)


@pytest.mark.parametrize(("D", "dtype"), [(48, torch.float32), (32, torch.float64)])
def test_what_triton_cannot_do_is_refused_when_asked_for_by_name(D, dtype):
    inputs = problem([3, 8], S=8, D=D, dtype=dtype)
    with pytest.raises(ValueError, match="does not support"):
        decode_attention(**inputs, impl="triton")
    assert_close("out", decode_attention(**inputs), by_hand(**inputs), rtol=1e-6)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradients_are_refused(name):
    inputs = problem([3, 8], S=8)
    inputs[name].requires_grad_()
    with pytest.raises(ValueError, match="no backward"):
        decode_attention(**inputs)
    with torch.no_grad():
        decode_attention(**inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("D", [32, 64, 128, 256])
@pytest.mark.parametrize(("B", "HQ", "H", "S"), [(3, 16, 16, 4097), (70, 16, 8, 300)])
def test_triton_on_a_gpu_equals_the_reference(B, HQ, H, S, D, dtype):
    lengths = [(37 * row * row + S) % (S + S // 2) for row in range(B)]
    inputs = problem(lengths, S, HQ, H, D, dtype, slopes=D == 64)
    ref = decode_attention(**upcast(inputs), impl="reference")
    out = decode_attention(**inputs, impl="triton")
    if dtype == torch.float32:
        assert_close("out", out, ref, rtol=1e-5)
    else:
        low = decode_attention(**inputs, impl="reference")
        assert_close("out", out, ref, rtol=5e-3, low=low)
    assert torch.equal(decode_attention(**inputs, impl="triton"), out)


@pytest.mark.gpu
def test_more_rows_and_heads_than_an_axis_of_the_grid_holds():
    inputs = problem([2] * 70_000, S=2, HQ=1, H=1)
    out = decode_attention(**inputs, impl="triton")
    assert_close("out", out, decode_attention(**inputs, impl="reference"), rtol=1e-5)


@pytest.mark.parametrize("scale", [-0.7, 0.0, -0.0])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_scale_of_decoding_may_be_zero_or_negative(impl, scale):
    if impl == "triton":
        pytest.importorskip("triton")
    q, k, v = torch.randn(1, 2, 32), *torch.randn(2, 1, 4, 2, 32)
    if torch.cuda.is_available():
        q, k, v = q.cuda(), k.cuda(), v.cuda()
    k[:, 3], v[:, 3] = math.nan, math.nan  # no token is there yet
    lengths = torch.tensor([3], device=q.device)
    out = decode_attention(q, k, v, lengths, scale=scale, impl=impl)
    weights = (torch.einsum("bhd,bshd->bhs", q, k[:, :3]) * scale).softmax(-1)
    torch.testing.assert_close(out, torch.einsum("bhs,bshd->bhd", weights, v[:, :3]))
