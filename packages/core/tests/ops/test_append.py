import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.ops.decode_attention import append_token_
from mezzo_core.positions import RopeScaling
from mezzo_core.testing import assert_close

from .impls import DEVICE, impls

some = settings(max_examples=settings().max_examples // 5)
BASE = 500.0
FLAT = torch.contiguous_format
CACHE = ("k_cache", "v_cache", "lengths")


def problem(lengths, S, HQ=4, H=2, D=32, dtype=torch.float32, seed=0):
    """Random inputs by name: q, k and v are views of one projection, and every slot holds data."""
    draw = torch.Generator().manual_seed(seed)
    B = len(lengths)
    x = torch.randn(B, (HQ + 2 * H) * D, generator=draw).to(DEVICE, dtype)
    parts = x.split([HQ * D, H * D, H * D], dim=1)
    inputs = {name: part.unflatten(1, (-1, D)) for name, part in zip("qkv", parts, strict=True)}
    caches = torch.randn(2, B, S, H, D, generator=draw).to(DEVICE, dtype)
    inputs["k_cache"], inputs["v_cache"] = caches
    inputs["lengths"] = torch.tensor(lengths, dtype=torch.int64, device=DEVICE)
    return inputs


def cast(inputs, dtype, names=("q", "k", "v", "k_cache", "v_cache")):
    return {**inputs, **{name: inputs[name].to(dtype) for name in names}}


def append(inputs, impl, rope_base=BASE, rope_scaling=None):
    """Append to copies of the cache; return the queries and the copies, by name."""
    cache = {name: inputs[name].clone() for name in CACHE}
    q = append_token_(
        **{**inputs, **cache}, rope_base=rope_base, rope_scaling=rope_scaling, impl=impl
    )
    return {"q": q, **cache}


def turned(x, n, slower=1):
    """Rotate the heads of one token, (H, D), to place n by products of complex numbers."""
    half = x.shape[-1] // 2
    angle = n / slower * BASE ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    pairs = torch.complex(x[:, :half].double(), x[:, half:].double())
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], -1)


def check_equal(found, expected, **bounds):
    assert torch.equal(found["lengths"], expected["lengths"])
    for name in ("q", "k_cache", "v_cache"):
        assert found[name].dtype == expected[name].dtype
        assert_close(name, found[name], expected[name], **bounds)


@impls
@pytest.mark.parametrize("H", [1, 2, 4])
def test_a_token_goes_to_its_place_and_nothing_else_changes(impl, H):
    inputs = problem([0, 1, 6, 7, 8, 23], S=7, H=H)
    found = append(inputs, impl)
    slots = [0, 1, 6, 0, 1, 2]
    for row, n in enumerate(inputs["lengths"].tolist()):
        assert_close("q", found["q"][row], turned(inputs["q"][row], n), rtol=1e-6)
        written = found["k_cache"][row, slots[row]]
        assert_close("k", written, turned(inputs["k"][row], n), rtol=1e-6)
        assert torch.equal(found["v_cache"][row, slots[row]], inputs["v"][row])
        others = [slot for slot in range(7) if slot != slots[row]]
        for name in ("k_cache", "v_cache"):
            assert torch.equal(found[name][row, others], inputs[name][row, others])
    assert torch.equal(found["lengths"], inputs["lengths"] + 1)


@impls
def test_a_cache_holds_the_last_tokens_of_each_row(impl):
    S, steps = 5, 13
    tokens = [problem([0, 3], S, seed=step) for step in range(steps)]
    cache = {name: tokens[0][name].clone() for name in CACHE}
    for token in tokens:
        append_token_(**{**token, **cache}, rope_base=None, impl=impl)
    assert cache["lengths"].tolist() == [13, 16]
    for row, first in enumerate((0, 3)):
        for step in range(steps - S, steps):
            slot = (first + step) % S
            assert torch.equal(cache["k_cache"][row, slot], tokens[step]["k"][row])
            assert torch.equal(cache["v_cache"][row, slot], tokens[step]["v"][row])


@some
@given(st.data())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_equals_the_reference(dtype, data):
    pytest.importorskip("triton")
    S = data.draw(st.integers(1, 40))
    lengths = data.draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=4))
    H, G = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1), (5, 4)]))
    D, base = data.draw(st.sampled_from([32, 64, 128])), data.draw(st.sampled_from([BASE, 1e4]))
    inputs = problem(lengths, S, H * G, H, D, dtype, seed=data.draw(st.integers(0, 99)))
    check_triton(inputs, base)


def check_triton(inputs, base):
    """Check the kernel against the reference: in low precision, both round one true result."""
    dtype, low = inputs["q"].dtype, append(inputs, "reference", base)
    found = append(inputs, "triton", base)
    if dtype == torch.float32:
        check_equal(found, low, rtol=1e-6)
        return
    true = append(cast(inputs, torch.float32), "reference", base)
    for name in ("q", "k_cache", "v_cache"):
        assert found[name].dtype == dtype
        assert_close(name, found[name], true[name], rtol=torch.finfo(dtype).eps / 2, low=low[name])
    assert torch.equal(found["lengths"], true["lengths"])
    others = torch.ones(inputs["k_cache"].shape[:2], dtype=torch.bool, device=DEVICE)
    n = inputs["lengths"]
    others[torch.arange(len(n), device=DEVICE), n % others.shape[1]] = False
    for name in ("k_cache", "v_cache"):
        assert torch.equal(found[name][others], inputs[name][others])


@impls
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float16), (torch.float16, torch.float32)])
def test_results_are_rounded_once_to_the_dtype_of_the_cache(impl, dtypes):
    outside, inside = dtypes
    inputs = cast(problem([0, 4, 9], S=6), outside)
    inputs = cast(inputs, inside, ("k_cache", "v_cache"))
    true = append(cast(inputs, torch.float32), impl)
    rounded = cast(true, inside, ("q", "k_cache", "v_cache"))
    for name, x in append(inputs, impl).items():
        assert torch.equal(x, rounded[name]), name


@impls
def test_scaling_slows_the_rotation(impl):
    inputs = problem([5, 8], S=16)
    found = append(inputs, impl, rope_scaling=RopeScaling(4.0))
    for row, n in enumerate((5, 8)):
        assert_close("q", found["q"][row], turned(inputs["q"][row], n, slower=4), rtol=1e-6)
        written = found["k_cache"][row, n]
        assert_close("k", written, turned(inputs["k"][row], n, slower=4), rtol=1e-6)


@impls
def test_without_rope_the_token_is_stored_as_it_is(impl):
    inputs = problem([5, 8], S=8)
    found = append(inputs, impl, rope_base=None)
    assert torch.equal(found["q"], inputs["q"])
    assert found["q"].is_contiguous()
    assert found["q"].data_ptr() != inputs["q"].data_ptr()
    for name in "kv":
        assert torch.equal(found[f"{name}_cache"][[0, 1], [5, 0]], inputs[name])


@impls
def test_strides_do_not_matter(impl):
    inputs = problem([5, 8], S=8)
    expected = append(inputs, impl)
    assert not inputs["q"].is_contiguous()
    orders = [(0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 2, 0)]
    for order, other in zip(orders, orders[1:] + orders[:1], strict=True):
        q, k, v = inputs["q"].contiguous(), inputs["k"].mT.contiguous().mT, inputs["v"]
        laid = {"q": q, "k": k, "v": v, "lengths": inputs["lengths"].clone()}
        for name, axes in (("k_cache", order), ("v_cache", other)):
            back = [axes.index(axis) for axis in range(4)]
            laid[name] = inputs[name].permute(axes).clone(memory_format=FLAT).permute(back)
        # In place, and not in copies, which would lose the strides.
        laid["q"] = append_token_(**laid, rope_base=BASE, impl=impl)
        assert laid["q"].is_contiguous()
        for name in ("q", *CACHE):
            assert torch.equal(laid[name], expected[name]), (name, order)


@impls
def test_lengths_may_be_int32_and_spread_out(impl):
    inputs = problem([3, 8], S=8)
    expected = append(inputs, impl)
    spread = torch.stack([inputs["lengths"].int()] * 3, 1)
    q = append_token_(**{**inputs, "lengths": spread[:, 1]}, rope_base=BASE, impl=impl)
    assert spread.tolist() == [[3, 4, 3], [8, 9, 8]]
    assert torch.equal(q, expected["q"])
    assert torch.equal(inputs["k_cache"], expected["k_cache"])


@impls
def test_no_rows_are_legal(impl):
    assert append(problem([], S=4), impl)["q"].shape == (0, 4, 32)


@impls
@pytest.mark.parametrize("rope", [(BASE, None), (None, None), (BASE, [8.0, 1.0, 4.0, 99.0])])
def test_opcheck(impl, rope):
    arguments = (*problem([3, 9], S=8).values(), *rope, impl)
    torch.library.opcheck(torch.ops.mezzo.append_token_.default, arguments)
    low = cast(problem([3, 9], S=8), torch.bfloat16, ("q", "k", "v"))
    arguments = (*low.values(), *rope, impl)
    torch.library.opcheck(torch.ops.mezzo.append_token_.default, arguments)


@impls
@pytest.mark.any_shapes
def test_compiles_to_one_graph(impl):
    inputs = problem([3, 9], S=8)
    expected = append(inputs, impl)

    def step(**inputs):
        return append_token_(**inputs, rope_base=BASE, impl=impl)

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    q = torch.compile(step, fullgraph=True, backend=backend)(**inputs)
    check_equal({**inputs, "q": q}, expected, rtol=1e-6)


@pytest.mark.parametrize(("name", "names"), [("k", "q, k and v"), ("v_cache", "k_cache and v_cac")])
def test_dtypes_that_differ_are_refused(name, names):
    """The other bad arguments are in tests/test_arguments.py."""
    inputs = problem([3, 8], S=8)
    inputs[name] = inputs[name].bfloat16()
    with pytest.raises(TypeError, match=f"{names}.* must have one floating dtype"):
        append_token_(**inputs, rope_base=BASE)


def test_a_cache_without_slots_is_refused():
    with pytest.raises(ValueError, match="S at least 1"):
        append_token_(**problem([3, 8], S=0), rope_base=BASE)


@pytest.mark.parametrize("name", CACHE)
def test_rows_that_share_memory_are_refused(name):
    inputs = problem([3, 8], S=8)
    inputs[name] = inputs[name][:1].expand_as(inputs[name])
    with pytest.raises(ValueError, match=f"rows of {name} share memory"):
        append_token_(**inputs, rope_base=BASE)


@impls
@pytest.mark.any_shapes
def test_a_bad_rotation_is_refused_before_anything_is_written(impl):
    inputs = problem([3, 8], S=8)
    before = {name: inputs[name].clone() for name in CACHE}
    for base, error in ((math.nan, ValueError), (math.inf, ValueError), ("9", TypeError)):
        with pytest.raises(error, match="rope_base must be"):
            append_token_(**inputs, rope_base=base, impl=impl)
    with pytest.raises(ValueError, match="rope_base must be positive"):
        append_token_(**inputs, rope_base=0.0, impl=impl)
    assert all(torch.equal(inputs[name], before[name]) for name in CACHE)
    with pytest.raises(ValueError, match="D must be even"):
        append_token_(**problem([3, 8], S=8, D=5), rope_base=BASE)


def test_negative_lengths_are_refused_on_a_cpu():
    inputs = {name: x.cpu() for name, x in problem([3, -1], S=8).items()}
    with pytest.raises(ValueError, match="lengths must be 0 or more, got -1"):
        append_token_(**inputs, rope_base=None)


@pytest.mark.parametrize(("D", "dtype"), [(48, torch.float32), (32, torch.float64)])
def test_what_triton_cannot_do_is_refused_when_asked_for_by_name(D, dtype):
    inputs = problem([3, 8], S=8, D=D, dtype=dtype)
    with pytest.raises(ValueError, match="does not support"):
        append(inputs, "triton")
    found = append(inputs, "auto")
    assert_close("q", found["q"][1], turned(inputs["q"][1], 8), rtol=1e-6)
    mixed = cast(problem([3, 8], S=8), torch.float64, ("k_cache", "v_cache"))
    with pytest.raises(ValueError, match=r"does not support torch\.float64"):
        append(mixed, "triton")


@pytest.mark.parametrize("name", ["q", "v_cache"])
def test_gradients_are_refused(name):
    inputs = problem([3, 8], S=8)
    inputs[name] = inputs[name].clone().requires_grad_()
    with pytest.raises(ValueError, match="no backward"):
        append_token_(**inputs, rope_base=BASE)
    with torch.no_grad():
        append_token_(**inputs, rope_base=BASE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("D", [32, 64, 128, 256])
@pytest.mark.parametrize(("B", "HQ", "H", "S"), [(1, 16, 16, 4097), (70, 24, 8, 300), (3, 1, 1, 1)])
def test_triton_on_a_gpu_equals_the_reference(B, HQ, H, S, D, dtype):
    lengths = [37 * row * row + 200_000 * (row % 2) + S for row in range(B)]
    check_triton(problem(lengths, S, HQ, H, D, dtype), 10_000.0)


@pytest.mark.gpu
def test_a_graph_appends_at_every_replay_and_no_thread_overtakes_the_length():
    # Two warps and more read a row's length, and one writes it.
    S, steps, rows = 64, 150, 100
    inputs = problem(range(rows), S, HQ=32, H=32, D=128, dtype=torch.bfloat16)
    inputs["q"], inputs["k"], inputs["v"] = (inputs[x].clone() for x in "qkv")
    tokens = [torch.randn_like(inputs["k"]) for _ in range(steps)]
    eager = {name: inputs[name].clone() for name in CACHE}
    outputs = []
    for token in tokens:
        now = {"q": token, "k": token, "v": token, **eager}
        outputs.append(append_token_(**now, rope_base=BASE, impl="reference"))
    append_token_(**{**inputs, **{x: inputs[x].clone() for x in CACHE}}, rope_base=BASE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = append_token_(**inputs, rope_base=BASE, impl="triton")
    for token, expected in zip(tokens, outputs, strict=True):
        for name in "qkv":
            inputs[name].copy_(token)
        graph.replay()
        assert_close("q", q, expected, rtol=1e-3)
    assert torch.equal(inputs["lengths"], eager["lengths"])
    assert torch.equal(inputs["v_cache"], eager["v_cache"])
    assert_close("k_cache", inputs["k_cache"], eager["k_cache"], rtol=1e-3)


@pytest.mark.gpu
def test_no_stream_reads_angles_that_a_busy_one_has_yet_to_compute():
    inputs, base = problem([3, 900], S=1000), 321.0  # of no other test
    append(inputs, "triton")  # compiles the kernel
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    append(inputs, "triton", base)
    with torch.cuda.stream(torch.cuda.Stream()):
        found = append(inputs, "triton", base)
        torch.cuda.current_stream().synchronize()
    check_equal(found, append(inputs, "reference", base), rtol=1e-6)


@pytest.mark.gpu
def test_more_rows_than_an_axis_of_the_grid_holds():
    inputs = problem([2] * 70_000, S=2, HQ=1, H=1)
    check_equal(append(inputs, "triton"), append(inputs, "reference"), rtol=1e-6)
