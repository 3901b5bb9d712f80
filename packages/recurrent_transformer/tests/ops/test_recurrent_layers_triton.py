"""The whole op with its kernels against the same in PyTorch: in the interpreter, or on a GPU.

On a GPU calls are repeated: the steps of a tile become a CUDA graph in the first call, and a small
call as a whole in its third.
"""

import pytest
import torch
from mezzo_core.testing import assert_close, grads
from mezzo_recurrent_transformer.ops.recurrent_layers import (
    LayerWeights,
    Past,
    graphs,
    recurrent_layers,
    workspace,
)

pytest.importorskip("triton")
from mezzo_recurrent_transformer.ops.recurrent_layers.triton import early, products

from .comparison import DEVICE, each_dtype

# Whole layers round at every product of every token; PyTorch's own error is the sharper bound.
RTOL = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 3e-3}
# n, B, T, H, D, norm, block_size.
CASES = {
    "one layer": (1, 3, 25, 2, 16, "rms", 1),
    "a wavefront": (3, 1, 33, 1, 16, "layer", 1),
    "narrow heads": (2, 1, 18, 4, 8, "none", 1),
    "blocks": (2, 2, 23, 1, 32, "rms", 5),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def problem(case, dtype=torch.float32, seed=0):
    """Return x and weights by name, what gradients are pulled by, and the options."""
    n, B, T, H, D, norm, block_size = case
    C, F = H * D, 3 * H * D
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    sizes = dict.fromkeys(("wq", "wk", "wv", "wo"), (n, C, C)) | {
        "up": (n, F, C),
        "down": (n, C, F),
    }
    inputs = {name: (normal(*size) * size[-1] ** -0.5).to(dtype) for name, size in sizes.items()}
    if norm != "none":
        inputs |= {name: 1 + 0.2 * normal(n, C) for name in ("n1", "n2", "q_norm", "k_norm")}
    inputs["x"] = normal(B, T, C).to(dtype)
    slopes = 2.0 ** -torch.arange(1, H + 1, device=DEVICE)
    options = {"num_heads": H, "norm": norm, "block_size": block_size, "alibi_slopes": slopes}
    return inputs, normal(B, T, C), options | {"residual_scale": n**-0.5}


def run(impl, inputs, pull, options):
    """Return the output and all gradients by name."""

    def call(x, **weights):
        return recurrent_layers(x, LayerWeights(**weights), impl=impl, **options).z

    z, found = grads(call, inputs, pull.to(inputs["x"].dtype))
    return found | {"z": z}


def assert_right(found, inputs, pull, options, dtype):
    exact = {name: value.float() for name, value in inputs.items()}
    truth, low = (run("eager", given, pull, options) for given in (exact, inputs))
    for name, value in found.items():
        rounded = None if dtype == torch.float32 else low[name]
        assert_close(name, value, truth[name], rtol=RTOL[dtype], low=rounded)
        if rounded is not None:
            error, theirs = ((x.float() - truth[name]).norm() for x in (value, rounded))
            assert error <= 1.5 * theirs, f"{name}: {error:.3e}, in PyTorch {theirs:.3e}"


@each_dtype
@cases
def test_outputs_and_all_gradients_equal_eager_and_repeats_are_bit_equal(case, dtype):
    given = problem(case, dtype)
    found = run("triton", *given)
    assert_right(found, *given, dtype)
    for _ in range(4 if DEVICE == "cuda" else 0):
        for name, value in run("triton", *given).items():
            assert torch.equal(value, found[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 3])
def test_kernels_that_begin_early_give_what_they_give_one_after_another(n, monkeypatch):
    given = problem((n, 32, 48, 16, 64, "rms", 1), torch.bfloat16)
    found = [run("triton", *given) for _ in range(6)]  # by graphs of steps, then of whole calls
    workspace._kept.clear()
    graphs._captured.clear()
    monkeypatch.setattr(early, "HOPPER", 10**6)  # no GPU can
    wanted = run("triton", *given)
    for each in found:
        for name, value in each.items():
            assert torch.equal(value, wanted[name]), name


@torch.no_grad()
def test_a_broken_token_of_a_block_leaves_earlier_tokens_and_other_rows_bit_equal():
    (inputs, _, options), found = problem((1, 2, 8, 1, 32, "rms", 4)), []
    x = inputs.pop("x")
    for value in (x[0, 6].clone(), torch.nan, 1e38):
        x[0, 6] = value
        found.append(recurrent_layers(x, LayerWeights(**inputs), impl="triton", **options).z)
    clean, spoilt, large = found
    for z in (spoilt, large):
        assert torch.equal(z[0, :6], clean[0, :6])
        assert torch.equal(z[1], clean[1])
    assert spoilt[0, 6:].isnan().all()


@pytest.mark.parametrize("in_kernels", [products.DTYPES, (torch.float32,)])  # also narrow leaves
def test_strides_do_not_matter(in_kernels, monkeypatch):
    monkeypatch.setattr(products, "DTYPES", in_kernels)
    inputs, pull, options = problem((2, 2, 2, 2, 16, "layer", 1))
    k, v = torch.randn(2, 2, 2, 4, 2, 16, device=DEVICE)
    past = Past(k, v, torch.tensor([3, 1], device=DEVICE))
    truth = run("eager", inputs, pull, options | {"past": past})

    def strided(x):
        return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]

    slopes, lengths = strided(options["alibi_slopes"]), strided(past.lengths)
    options |= {"alibi_slopes": slopes, "past": past._replace(lengths=lengths)}
    inputs = {name: strided(value) for name, value in inputs.items()}
    for name, value in run("triton", inputs, pull, options).items():
        assert_close(name, value, truth[name], rtol=RTOL[torch.float32])


@pytest.mark.parametrize("case", [CASES["narrow heads"], CASES["one layer"]], ids=str)
def test_leaves_in_one_kernel_give_the_same(case, monkeypatch):
    monkeypatch.setattr(products, "DTYPES", (torch.float32,))
    given = problem(case)
    assert_right(run("triton", *given), *given, torch.float32)


@pytest.mark.gpu
def test_calls_of_two_shapes_in_turn_do_not_disturb_each_other():
    problems = [problem((n, B, T, 2, 32, "rms", 1)) for n, B, T in ((2, 3, 40), (2, 5, 40))]
    first = [run("triton", *given) for given in problems]
    for _ in range(4):
        for given, wanted in zip(problems, first, strict=True):
            for name, value in run("triton", *given).items():
                assert torch.equal(value, wanted[name]), name


@pytest.mark.gpu
def test_other_weights_of_the_same_shapes_are_used():
    case = CASES["a wavefront"]
    for seed in range(5):
        given = problem(case, seed=seed)
        assert_right(run("triton", *given), *given, torch.float32)


@pytest.mark.gpu
def test_bad_borders_are_refused_on_a_gpu_too():
    inputs, pull, options = problem((1, 1, 25, 2, 16, "rms", 1))
    options["cu_seqlens"] = torch.tensor([0, 9, 24], device=DEVICE)
    with pytest.raises(ValueError, match="end at T = 25"):
        run("triton", inputs, pull, options)


@pytest.mark.gpu
def test_gradients_accumulate_over_micro_batches():
    inputs, pull, options = problem((2, 4, 40, 2, 32, "rms", 1))
    whole = run("triton", inputs, pull, options)
    totals = {name: torch.zeros_like(value) for name, value in whole.items() if name[0] != "x"}
    for i in range(4):
        part = run("triton", inputs | {"x": inputs["x"][i : i + 1]}, pull[i : i + 1], options)
        for name in totals.keys() - {"z"}:
            totals[name] += part[name]
    for name in totals.keys() - {"z"}:
        assert_close(name, totals[name], whole[name], rtol=1e-5)


@pytest.mark.gpu
def test_calls_in_inference_mode_leave_nothing_that_training_may_not_overwrite():
    given = inputs, _, options = problem((2, 3, 39, 2, 16, "rms", 1))
    weights = LayerWeights(**{name: w for name, w in inputs.items() if name != "x"})
    with torch.inference_mode():
        for _ in range(4):
            recurrent_layers(inputs["x"], weights, impl="triton", **options)
    for _ in range(4):
        assert_right(run("triton", *given), *given, torch.float32)


@pytest.mark.gpu
def test_another_stream_gives_the_same():
    given = problem(CASES["a wavefront"])
    wanted = run("triton", *given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [run("triton", *given) for _ in range(4)]
    torch.cuda.current_stream().wait_stream(stream)
    for each in found:
        for name, value in each.items():
            assert torch.equal(value, wanted[name]), name


@each_dtype
def test_segments_with_their_past_equal_the_whole(dtype):
    (n, B, T, H, D, *_), (inputs, _, options) = (
        CASES["one layer"],
        problem(CASES["one layer"], dtype),
    )
    x, weights = inputs.pop("x"), LayerWeights(**inputs)
    whole = recurrent_layers(x, weights, impl="triton", **options).z
    empty = x.new_empty(n, B, 0, H, D)
    past = Past(empty, empty, torch.zeros(B, dtype=torch.int64, device=DEVICE))
    found = []
    for segment in x.split([5, 1, 3, T - 9], 1):
        z, past = recurrent_layers(segment, weights, past=past, impl="triton", **options)
        found.append(z)
    assert_close("z", torch.cat(found, 1), whole, rtol=4 * RTOL[dtype])
