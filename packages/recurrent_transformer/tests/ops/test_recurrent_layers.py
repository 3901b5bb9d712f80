"""All recurrent layers at once: tiles against the definition, limits, packing, the past."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mezzo_core.positions import alibi_slopes
from mezzo_core.testing import assert_close, grads
from mezzo_recurrent_transformer import TransformerBlockConfig
from mezzo_recurrent_transformer.ops.recurrent_layers import (
    LayerWeights,
    Past,
    recurrent_layers,
    tiles,
)

from .problems import layers, problem

EXACT = torch.float64
RTOL = {torch.float64: 1e-10, torch.float32: 1e-5}
# Name: (B, T, arguments). Tiles of several layers have 16 tokens at these sizes.
CASES = {
    "one token": (2, 1, {}),
    "two tiles and one": (2, 33, {}),
    "packed": (1, 41, {"packed": (0, 1, 17, 0, 1, 3, 19, 0)}),
    "after a past": (3, 18, {"seen": (4, 0, 2)}),
    "padded": (3, 18, {"seen": (0, 4, 2), "real": (18, 0, 7)}),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def run(impl, inputs, options, pull):
    """Outputs and gradients by name."""
    outputs, gradients = grads(layers(impl, **options), inputs, pull)
    found = dict(zip("zkv", outputs, strict=False))
    return found | {f"d{name}": value for name, value in gradients.items()}


def assert_same(found, wanted, rtol, atol=1e-12):
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value.dtype == wanted[name].dtype, name
        assert_close(name, value, wanted[name], rtol=rtol, atol=atol)


def check(case, n=2, H=2, D=4, F=12, *, norm="rms", alibi=True, dtype=EXACT, seed=0, **more):
    inputs, options, pull = problem(
        case, n, H, D, F, norm=norm, alibi=alibi, dtype=dtype, seed=seed
    )
    found, wanted = (run(impl, inputs, options | more, pull) for impl in ("eager", "reference"))
    # The gradient of a query that sees one token is 0, but for rounding: hence atol.
    assert_same(found, wanted, RTOL[dtype], 1e-12 if dtype == EXACT else 1e-6)


@cases
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tiles_equal_the_definition_with_all_gradients(case, dtype):
    check(case, dtype=dtype)


@pytest.mark.parametrize(
    ("n", "case", "block_size"),
    [
        (1, (2, 64, {}), 1),
        (2, (1, 128, {}), 4),
        (2, (1, 96, {}), 12),  # two steps in a leaf
        (2, (1, 80, {}), 20),
        (2, (3, 63, {"seen": (4, 0, 2), "real": (63, 0, 40)}), 1),
        (1, (1, 95, {"packed": (31, 64)}), 1),
    ],
)
def test_tiles_of_several_leaves_equal_the_definition(
    n, case, block_size, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tiles, "MANY_ROWS", 0)
    if "packed" not in case[2]:
        tiling = tiles.Tiling.of(n, 1, case[1], block_size)
        assert tiling.S // tiles.leaf_size(block_size) > 1
    check(case, n, block_size=block_size)


@settings(max_examples=settings().max_examples // 3)
@given(
    n=st.integers(1, 4),
    B=st.integers(1, 3),
    T=st.sampled_from([0, 1, 2, 15, 16, 17, 31, 37, 64]),
    H=st.integers(1, 3),
    D=st.sampled_from([1, 4, 5]),
    F=st.sampled_from([1, 7, 16]),
    norm=st.sampled_from(["rms", "layer", "none"]),
    persistent_norm=st.booleans(),
    block_size=st.sampled_from([1, 1, 2, 4, 5, 16, 32, 50]),
    alibi=st.booleans(),
    residual_scale=st.sampled_from([0.0, -0.5, 0.3, 1.0]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 1000),
)
@example(3, 2, 37, 2, 4, 7, "layer", False, 5, True, 0.3, torch.float64, 0)
@example(4, 1, 17, 2, 4, 7, "none", False, 16, True, 0.3, torch.float64, 0)
@example(2, 1, 37, 2, 4, 7, "rms", True, 50, True, 0.3, torch.float64, 0)
def test_tiles_equal_the_definition_at_any_shape(
    n, B, T, H, D, F, norm, persistent_norm, block_size, alibi, residual_scale, dtype, seed
):
    if D * H == 1 and norm == "layer":
        return  # standardizing one number gives noise
    if D * H < 8:
        dtype = EXACT  # few channels may all be near zero, and a norm then magnifies rounding
    case = (B, T, {})
    more = {"persistent_norm": persistent_norm, "block_size": block_size}
    sizes = (n, H, D, F)
    check(
        case, *sizes, norm=norm, alibi=alibi, dtype=dtype, seed=seed, **more,
        residual_scale=residual_scale,
    )  # fmt: skip


@settings(max_examples=settings().max_examples // 8)
@given(
    T=st.sampled_from([0, 1, 15, 16, 17, 33]),
    seen=st.lists(st.integers(0, 19), min_size=1, max_size=3),
    padding=st.booleans(),
    norm=st.sampled_from(["rms", "layer", "none"]),
    persistent_norm=st.booleans(),
    part=st.floats(0, 1),
)
def test_tiles_equal_the_definition_after_any_past(T, seen, padding, norm, persistent_norm, part):
    given = {"seen": seen}
    if padding:
        given["real"] = [round(T * part), *[T] * len(seen)][: len(seen)]
    check((len(seen), T, given), norm=norm, persistent_norm=persistent_norm)


def test_no_tokens_pass_the_gradients_of_the_past_on():
    check((2, 0, {"seen": (3, 1)}))


@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_no_tokens_copy_the_past_to_the_dtype_of_the_weights(impl):
    inputs, options, _ = problem((2, 0, {"seen": (3, 1)}))
    x, k, v, seen = (inputs.pop("x"), inputs.pop("k"), inputs.pop("v"), options.pop("seen"))
    for dtype in (torch.float32, EXACT):
        past = Past(k.to(dtype), v.to(dtype), seen)
        after = recurrent_layers(x, LayerWeights(**inputs), past=past, impl=impl, **options).past
        for new, old in zip(after[:2], past[:2], strict=True):
            assert new.dtype == EXACT
            assert torch.equal(new, old.to(EXACT))
            assert new.data_ptr() != old.data_ptr()


@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_no_rows_have_pairs_of_every_slot(impl):
    inputs, options, _ = problem((0, 3, {}))
    inputs |= {name: torch.ones(2, 0, 4, 2, 4, dtype=EXACT) for name in ("k", "v")}
    options["seen"] = torch.zeros(0, dtype=torch.int64)
    z, k, v = layers(impl, **options)(**inputs)
    assert z.shape == (0, 3, 8)
    assert k.shape == v.shape == (2, 0, 7, 2, 4)


@pytest.mark.parametrize("pulled", [0, 1, 2])
@pytest.mark.parametrize("name", ["after a past", "padded"])
def test_each_output_can_be_pulled_alone(name, pulled):
    inputs, options, pull = problem(CASES[name])
    only = tuple(d if i == pulled else None for i, d in enumerate(pull))
    zeroed = tuple(d * (i == pulled) for i, d in enumerate(pull))
    found = run("eager", inputs, options, only)
    assert_same(found, run("reference", inputs, options, zeroed), 1e-10)


@pytest.mark.parametrize("norm", ["rms", "layer", "none"])
def test_a_block_as_long_as_the_sequence_is_a_transformer(norm):
    inputs, options, pull = problem((2, 21, {}), 1, norm=norm, alibi=False)
    options |= {"block_size": 21, "residual_scale": 0.6}
    config = TransformerBlockConfig(4, 12, norm, options["eps"], alibi="olmo", residual_scale=0.6)
    block = config.build(8).double()
    options["alibi_slopes"] = alibi_slopes(2, "olmo", dtype=torch.float64)
    names = {"up": "mlp.up", "down": "mlp.down", "n1": "mixer_norm", "n2": "mlp_norm"}
    names |= {name: f"mixer.{name}" for name in ("wq", "wk", "wv", "wo", "q_norm", "k_norm")}

    def transformer(x, **weights):
        own = {f"{names[name]}.weight": w[0] for name, w in weights.items()}
        return torch.func.functional_call(block, own, (x,), strict=True)[:1]

    for size in (21, 500):
        options["block_size"] = size
        (z, *_), gradients = grads(transformer, inputs, pull)
        wanted = {"z": z} | {f"d{name}": g for name, g in gradients.items()}
        assert_same(run("eager", inputs, options, pull), wanted, 1e-10)


@pytest.mark.parametrize("impl", ["reference", "eager"])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("packed", [(0, 1, 17, 0, 1, 3, 19, 0), (19, 2, 1, 18, 1), (16,), (5, 33)])
def test_a_packed_sequence_equals_itself_alone(packed, block_size, impl):
    inputs, options, pull = problem((1, sum(packed), {"packed": packed}))
    options["block_size"] = block_size
    options["cu_seqlens"] = options["cu_seqlens"].int()
    found = run(impl, inputs, options, pull)
    borders = options.pop("cu_seqlens").tolist()
    total = {}
    for start, end in pairwise(borders):
        own, its_pull = inputs | {"x": inputs["x"][:, start:end]}, pull[0][:, start:end]
        alone = run(impl, own, options, (its_pull,))
        for name, value in alone.items():
            if name in ("z", "dx"):
                assert_close(name, found[name][:, start:end], value, rtol=1e-10, atol=1e-12)
            else:
                total[name] = total.get(name, 0) + value
    for name, value in total.items():
        assert_close(name, found[name], value, rtol=1e-10)


def test_a_packed_sequence_that_broke_breaks_no_other():
    inputs, options, pull = problem(CASES["packed"])
    inputs["x"][0, 5] = torch.nan  # in the third sequence, which begins at 1 and ends before 18
    found = run("eager", inputs, options, pull)
    assert found["z"][0, 5:18].isnan().all()
    for name in ("z", "dx"):
        assert found[name][0, :1].isfinite().all()
        assert found[name][0, 18:].isfinite().all()
    assert found["z"][0, 1:5].isfinite().all()


@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_the_past_may_have_another_dtype(impl):
    inputs, options, _ = problem(CASES["after a past"])
    wanted, *_ = layers(impl, **options)(**inputs)
    low = {name: x if name in ("k", "v") else x.bfloat16() for name, x in inputs.items()}
    found, *_ = layers(impl, **options)(**low)
    assert_close("z", found, wanted, rtol=2e-2)


def test_padding_leaves_the_past_alone():
    inputs, options, pull = problem(CASES["padded"])
    found = run("eager", inputs, options, pull)
    for row, (seen, real) in enumerate(zip(options["seen"], options["lengths"], strict=True)):
        its = slice(row, row + 1)
        own = inputs | {"x": inputs["x"][its, :real]}
        own |= {name: inputs[name][:, its] for name in ("k", "v")}
        alone_options = options | {"seen": seen[None], "lengths": None}
        z, k, v = layers("eager", **alone_options)(**own)
        assert_close("z", found["z"][its, :real], z, rtol=1e-10)
        for name, pairs in (("k", k), ("v", v)):
            assert_close(
                name, found[name][:, its, : seen + real], pairs[:, :, : seen + real], rtol=1e-10
            )
            assert torch.equal(found[name][:, its, :seen], inputs[name][:, its, :seen])
        assert not found["dx"][its, real:].any()
        inputs["x"][row, real:] = torch.nan
        for name in ("k", "v"):
            inputs[name][:, row, seen:] = torch.inf
    again = run("eager", inputs, options, pull)
    for name, value in again.items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("T", [18, 2])  # that write over all old slots, or leave some
def test_what_slots_without_a_token_hold_never_counts(T):
    inputs, options, pull = problem((3, T, {"seen": (4, 0, 2)}))
    wanted = run("eager", inputs, options, pull)
    for row, seen in enumerate(options["seen"]):
        for name in ("k", "v"):
            inputs[name][:, row, seen:] = torch.nan
    for impl in ("reference", "eager"):
        found = run(impl, inputs, options, pull)
        for name in ("z", "dx", "dk", "dv", "dwq"):
            assert_close(f"{impl}: {name}", found[name], wanted[name], rtol=1e-10)


def test_gradients_of_slots_without_a_token_reach_no_token():
    inputs, options, (_, *pull) = problem(CASES["after a past"])
    seen = options.pop("seen")
    found = []
    for impl in ("reference", "eager"):

        def pairs(x, k, v, impl=impl, **weights):
            past = Past(k, v, seen)
            return recurrent_layers(
                x, LayerWeights(**weights), past=past, impl=impl, **options
            ).past[:2]

        found.append(grads(pairs, inputs, tuple(pull))[1])
    for name in ("x", "wq", "down"):
        assert_close(name, found[1][name], found[0][name], rtol=1e-10)


def test_the_past_holds_as_many_tokens_as_each_row_has_had():
    inputs, options, _ = problem(CASES["padded"])
    past = Past(inputs.pop("k"), inputs.pop("v"), options.pop("seen"))
    x, weights = inputs.pop("x"), LayerWeights(**inputs)
    for impl in ("reference", "eager"):
        after = recurrent_layers(x, weights, past=past, impl=impl, **options).past
        assert after.lengths.tolist() == [18, 4, 9]
        assert past.lengths.tolist() == [0, 4, 2]
        assert after.k.shape[2] == past.k.shape[2] + 18


@pytest.mark.parametrize("splits", [[3, 0, 5, 1, 5], [16, 1, 20]])
def test_segments_with_their_past_equal_the_whole_with_gradients(splits):
    inputs, options, pull = problem((2, sum(splits), {}))

    def segments(x, **weights):
        past = Past(*torch.empty(2, 2, 2, 0, 2, 4, dtype=EXACT), torch.zeros(2).long())
        outs = []
        for part in x.split(splits, 1):
            z, past = recurrent_layers(part, LayerWeights(**weights), past=past, **options)
            outs.append(z)
        return (torch.cat(outs, 1),)

    (z, *_), gradients = grads(segments, inputs, pull)
    found = {"z": z} | {f"d{name}": g for name, g in gradients.items()}
    assert_same(found, run("eager", inputs, options, pull), 1e-10)


@pytest.mark.parametrize("block_size", [1, 4, 64])
@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_a_broken_token_breaks_itself_and_what_follows(impl, block_size):
    inputs, options, _ = problem((2, 37, {}), dtype=torch.float32)
    options["block_size"] = block_size
    clean, *_ = layers(impl, **options)(**inputs)
    for bad in (torch.nan, torch.inf, 1e38):
        inputs["x"][0, 18] = bad
        z, *_ = layers(impl, **options)(**inputs)
        assert torch.equal(z[0, :18], clean[0, :18])
        assert torch.equal(z[1], clean[1])
        assert bad == 1e38 or not z[0, 18:].isfinite().any()


def test_outputs_of_no_token_have_no_gradient_of_the_past():
    inputs, options, _ = problem((2, 0, {"seen": (4, 0)}))
    past = {name: inputs[name].requires_grad_() for name in "kv"}
    z, *_ = layers("eager", **options)(**inputs)
    for found in torch.autograd.grad(z.sum(), past.values()):
        assert (found == 0).all()


@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_a_value_that_overflows_leaves_the_tokens_of_its_block_before_it(impl):
    inputs, options, _ = problem((1, 4, {}), norm="none", dtype=torch.float32)
    options["block_size"] = 4
    inputs["wv"][..., 0] = 2.0
    clean, *_ = layers(impl, **options)(**inputs)
    inputs["x"][0, 2] = 0
    inputs["x"][0, 2, 0] = 3e38  # its values are infinite, and no NaN
    z, *_ = layers(impl, **options)(**inputs)
    assert torch.equal(z[:, :2], clean[:, :2])


@cases
def test_repeats_are_bit_equal(case):
    inputs, options, pull = problem(case, dtype=torch.float32)
    first, second = (run("eager", inputs, options, pull) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("name", ["two tiles and one", "after a past", "padded"])
def test_strides_do_not_matter(name):
    inputs, options, pull = problem(CASES[name])
    wanted = run("eager", inputs, options, pull)
    turned = {k: v.transpose(0, 1).contiguous().transpose(0, 1) for k, v in inputs.items()}
    wide = {k: v.repeat_interleave(2, -1)[..., ::2] for k, v in inputs.items()}
    pulled = tuple(d.mT.contiguous().mT for d in pull)
    for strided in (turned, wide):
        assert not any(strided[k].is_contiguous() for k in strided.keys() & {"x", "wq", "k"})
        assert_same(run("eager", strided, options, pulled), wanted, 1e-12)


def test_x_may_begin_anywhere_in_its_storage_and_its_one_row_may_have_any_stride():
    inputs, options, pull = problem((1, 5, {}), dtype=torch.float32)
    wanted = run("eager", inputs, options, pull)
    size = inputs["x"].numel()
    for begin, stride in ((1, size), (0, size + 1)):
        x = inputs["x"].new_empty(size + 2).as_strided((1, 5, 8), (stride, 8, 1), begin)
        assert x.copy_(inputs["x"]).is_contiguous()
        assert_same(run("eager", inputs | {"x": x}, options, pull), wanted, 1e-12)


@pytest.mark.parametrize("name", ["two tiles and one", "packed", "padded"])
def test_bfloat16_is_as_exact_as_the_definition_in_bfloat16(name):
    inputs, options, pull = problem(CASES[name], 2, 2, 16, 32, dtype=torch.bfloat16)
    for matrix in ("wq", "wk", "wv", "wo", "up", "down"):
        inputs[matrix] *= 0.5
    single = {k: v.float() for k, v in inputs.items()}
    found = run("eager", inputs, options, pull)
    wanted = run("reference", single, options, tuple(d.float() for d in pull))
    low = run("reference", inputs, options, pull)
    for key, value in found.items():
        assert value.dtype == torch.bfloat16, key
        if not key.startswith("d"):
            assert_close(key, value, wanted[key], rtol=5e-3, low=low[key])
            continue
        # A gradient goes back through many products that are rounded: the definition's own error
        # in norm is above 5e-3 too.
        spread = ((low[key].float() - wanted[key]).norm() / wanted[key].norm()).item()
        assert_close(key, value, wanted[key], rtol=1.5 * spread, low=low[key], factor=3.0)


def test_autocast_computes_products_in_bfloat16_and_gives_gradients_in_float32():
    inputs, options, pull = problem(CASES["two tiles and one"], dtype=torch.float32)
    wanted = run("reference", inputs, options, pull)
    with torch.autocast("cpu", torch.bfloat16):
        found = run("eager", inputs, options, pull)
    with torch.no_grad():
        outside = layers("eager", **options)(**inputs)[0]
    assert not torch.equal(found["z"], outside)
    assert_same(found, wanted, 2e-2)
    products = ("wq", "wk", "wv", "wo", "up", "down")  # all else stays in float32
    low = run("eager", inputs | {name: inputs[name].bfloat16() for name in products}, options, pull)
    assert torch.equal(found["z"], low["z"])
    assert torch.equal(found["dx"], low["dx"])


@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_products_in_16_bits_leave_the_residual_stream_as_it_is(impl):
    inputs, options, _ = problem(CASES["one token"], dtype=torch.bfloat16)
    x = inputs.pop("x").float() + 1e-5
    z, *_ = layers(impl, **options | {"residual_scale": 0.0})(x, **inputs)
    assert torch.equal(z, x)


def test_autocast_leaves_float64_as_it_is():
    inputs, options, pull = problem(CASES["two tiles and one"])
    wanted = run("eager", inputs, options, pull)
    with torch.autocast("cpu", torch.bfloat16):
        found = run("eager", inputs, options, pull)
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name


def test_auto_is_eager_on_a_cpu_and_triton_is_refused_there():
    inputs, options, _ = problem(CASES["one token"], dtype=torch.float32)
    same = (layers(impl, **options)(**inputs)[0] for impl in ("auto", "eager"))
    assert torch.equal(*same)
    with pytest.raises(ValueError, match="impl"):
        layers("triton", **options)(**inputs | {"x": inputs["x"].double()})
