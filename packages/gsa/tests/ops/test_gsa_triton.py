"""Gated slot attention's kernels against the reference: here in the interpreter, or on a GPU."""

import itertools

import pytest
import torch
import torch.nn.functional as F
import triton
from mezzo_core.testing import assert_close, grads
from mezzo_gsa.ops.gsa import GSAState, chunk_gsa, recurrent_gsa
from mezzo_gsa.ops.gsa.chunked import chunked_gsa
from mezzo_gsa.ops.gsa.request import chunk_length
from mezzo_gsa.ops.gsa.triton import launches
from mezzo_gsa.ops.gsa.triton.launches import BAND
from triton.runtime.errors import OutOfResources

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = {torch.float16: 5e-3, torch.bfloat16: 5e-3, torch.float32: 1e-5}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STRENGTHS = list(itertools.product([False, True], DTYPES))
BETWEEN = ["softmax", "none", "swish", "relu", "relu_squared"]
gpu = pytest.mark.gpu


def normal(*shape, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draws).to(DEVICE)


def mix(gates, seed=9):
    """Replace 30% of the gates by -50."""
    return torch.where(normal(*gates.shape, seed=seed) > 0.52, -50.0, gates)


def draw(
    B, T, HQ=2, H=1, K=16, V=24, M=10, *, dtype=torch.float32, strength=False, state=False, seed=0
):
    """Draw inputs by name; `state` rows of initial memories, B of them if True, none if False."""
    S = B if state is True else state
    shapes = {"q": (HQ, K), "k": (H, K), "v": (H, V), "g": (H, M), "s": (H, M)}
    x = {n: normal(B, T, *shape, seed=seed + i) for i, (n, shape) in enumerate(shapes.items())}
    return {
        **{name: x[name].to(dtype) for name in "qkv"},
        "g": F.logsigmoid(x["g"]) / 8,
        "s": x["s"].sigmoid() if strength else None,
        "k0": normal(S, H, M, K, seed=seed + 5) if state else None,
        "v0": normal(S, H, M, V, seed=seed + 6) if state else None,
    }


def call(op, k0=None, v0=None, **x):
    """Call an op with the memories apart; return its results by name."""
    out, (k, v) = op(**x, initial_state=None if k0 is None else GSAState(k0, v0))
    return out, k, v


def in_one_dtype(
    q, k, v, g, s=None, k0=None, v0=None, *, scale=1.0, between="softmax", cu_seqlens=None
):
    """Run the reference's chunk form with every number in the dtype of q."""
    dtype, (B, _, H, M) = q.dtype, g.shape
    s = (-torch.expm1(g) if s is None else s).to(dtype)
    S = B if cu_seqlens is None else len(cu_seqlens) - 1
    zeros = (q.new_zeros(S, H, M, x.shape[3]) for x in (k, v))
    state = GSAState(*zeros) if k0 is None else GSAState(k0.to(dtype), v0.to(dtype))
    out, last = chunked_gsa(q, k, v, g.to(dtype), s, scale, between, state, cu_seqlens)
    return out, *last


def pull(fn, inputs, *, through_state):
    """Return all results and gradients by name."""
    k0, dtype = inputs["k0"], inputs["q"].dtype
    shape = (*inputs["q"].shape[:3], inputs["v"].shape[3])
    douts = [normal(*shape, seed=20).to(dtype), None, None]
    if through_state:
        shapes = (inputs[name].shape for name in ("k0", "v0"))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        douts[1:] = (normal(*shape, seed=21 + i).to(wide) for i, shape in enumerate(shapes))
    if k0 is None:
        inputs = {name: x for name, x in inputs.items() if name not in ("k0", "v0")}
    results, found = grads(fn, inputs, tuple(douts))
    named = dict(zip(("out", "final k", "final v"), results, strict=True))
    return {**named, **{f"d{name}": x for name, x in found.items()}}


def check(inputs, *, through_state=False, vanishes=(), truth=torch.float64, **form):
    """Compare results and gradients with the reference, by the numerics rule.

    The truth is the definition, or for long rows the chunk form. The yardstick is the chunk form
    with every number in the dtype of the inputs. Gradients in `vanishes` are zero but for rounding.
    """
    dtype, T = inputs["q"].dtype, inputs["q"].shape[1]

    def run(fn, to=None):
        x = {n: x if x is None or to is None else x.to(to) for n, x in inputs.items()}
        return pull(fn, x, through_state=through_state)

    def definition(**x):
        return call(recurrent_gsa, **x, **form) if T <= 200 else in_one_dtype(**x, **form)

    ours = run(lambda **x: call(chunk_gsa, **x, **form, impl="triton"))
    low = {} if dtype == torch.float32 else run(lambda **x: in_one_dtype(**x, **form))
    for name, expected in run(definition, truth).items():
        rtol = 8e-3 if name in ("dg", "ds") and dtype != torch.float32 else LOW[dtype]
        atol = 1e-3 if name in vanishes and dtype != torch.float32 else 1e-6
        yardstick = None if name in vanishes else low.get(name)
        factor = 2 if name == "out" else 3  # memories are sums, as gradients are
        assert_close(name, ours[name], expected, rtol=rtol, low=yardstick, factor=factor, atol=atol)


SHAPES = [  # T, HQ, H, K, V, M
    (1, 1, 1, 16, 16, 16),
    (63, 4, 2, 16, 40, 16),
    (65, 2, 1, 24, 16, 5),
    (130, 2, 2, 8, 72, 24),
    (100, 1, 1, 40, 32, 64),
]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [  # every shape in float32; the widest numbers of slots and values in 16 bits too
        *((sizes, torch.float32) for sizes in SHAPES),
        *itertools.product(SHAPES[3:], DTYPES[1:]),
    ],
    ids=str,
)
def test_results_and_gradients_equal_the_reference(sizes, dtype):
    check(draw(2 if sizes[0] == 63 else 1, *sizes, dtype=dtype), scale=sizes[3] ** -0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_flow_through_both_states(dtype):
    check(draw(2, 70, dtype=dtype, state=True), through_state=True, scale=0.3)


@pytest.mark.parametrize("packed", [False, True])
def test_memories_flow_from_segment_to_segment(packed, monkeypatch):
    monkeypatch.setattr("mezzo_gsa.ops.chunking.chunks.SEGMENT", 128)
    borders = torch.tensor([0, 3, 200, 200, 330], device=DEVICE) if packed else None
    inputs = draw(1, 330, 2, 1, 8, 8, 5, state=4 if packed else True, strength=True)
    inputs["g"] *= 0.06
    check(inputs, through_state=True, scale=0.3, cu_seqlens=borders)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("between", BETWEEN)
def test_strengths_and_every_way_between_the_passes(between, dtype):
    inputs = draw(1, 70, dtype=dtype, strength=True)
    check(inputs, between=between, scale=0.2)


def test_without_gates_nothing_decays():
    inputs = draw(1, 70, strength=True, state=True)
    inputs["g"] = None
    given = {**inputs, "g": torch.zeros_like(inputs["s"])}
    for ours, expected in zip(
        call(chunk_gsa, **inputs, impl="triton"), call(recurrent_gsa, **given), strict=True
    ):
        assert_close("result", ours, expected, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[40, 0, 1, 65], [0, 16, 17], [64, 64, 0], [1]])
@pytest.mark.parametrize("state", [False, True])
def test_packed_sequences_equal_the_reference(lengths, state):
    borders = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)
    inputs = draw(1, sum(lengths), 2, 1, state=len(lengths) if state else False, strength=True)
    check(inputs, through_state=state, cu_seqlens=borders, scale=0.3)


EXTREME = [0.0, -1e-4, -0.3, -1.0, -50.0, -1e4]


@pytest.mark.parametrize(
    ("gate", "dtype", "strength"),
    [  # every pair of a gate, a dtype, and whether a strength is given
        (gate, dtype, (i + j) % 2 == 0)
        for i, gate in enumerate(EXTREME)
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_extreme_gates_equal_the_reference(gate, dtype, strength):
    inputs = draw(1, 80, dtype=dtype, strength=strength, state=True)
    inputs["g"] = torch.full_like(inputs["g"], gate)
    vanishes = ("dg", "dk0", "dv0") if gate <= -50 else ()  # all is forgotten at once
    check(inputs, through_state=True, vanishes=vanishes, scale=0.3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_memories_that_only_grow_lose_fewer_digits_than_in_eager_code(dtype):
    # Over several chunks 16 bits do not keep the bounds of `check`: see `chunk_gsa`.
    inputs = draw(1, 200, dtype=dtype, strength=True, state=True)
    inputs["g"] = torch.zeros_like(inputs["g"])

    def run(fn, to=None):
        x = {name: x if to is None else x.to(to) for name, x in inputs.items()}
        return pull(fn, x, through_state=True)

    low, truth = (run(lambda **x: in_one_dtype(**x, scale=0.3), to) for to in (None, torch.float64))
    ours = run(lambda **x: call(chunk_gsa, **x, scale=0.3, impl="triton"))
    for name, exact in truth.items():
        found, eager = (torch.dist(x[name].double(), exact).item() for x in (ours, low))
        assert found <= eager, f"{name}: {found:.2e}, in eager code {eager:.2e}"


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *itertools.product([1e-4, 1e-2], DTYPES),
        (1e-6, torch.float32),
    ],  # float16 has few digits there
)
def test_gates_near_one_write_their_exact_share(size, dtype):
    inputs = draw(1, 70, dtype=dtype)
    inputs["g"] = -size * inputs["g"].exp()  # the memories hold only what these gates write
    exact = {name: x if x is None else x.double() for name, x in inputs.items()}
    ours, ref = call(chunk_gsa, **inputs, impl="triton"), call(recurrent_gsa, **exact)
    for name, x, expected in zip(("out", "final k", "final v"), ours, ref, strict=True):
        assert_close(name, x, expected, rtol=LOW[dtype])


@pytest.mark.parametrize(("strength", "dtype"), STRENGTHS)
def test_mixtures_of_gates_equal_the_reference(strength, dtype):
    inputs = draw(1, 130, 2, 1, dtype=dtype, strength=strength, state=True)
    check({**inputs, "g": mix(inputs["g"])}, through_state=True, scale=0.3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_where_all_else_is_forgotten_a_token_reads_its_own_value(dtype):
    inputs = draw(1, 80, 2, 1, 64, 64, 64, dtype=dtype)
    inputs["g"] = torch.full_like(inputs["g"], -50.0)
    out, _, _ = call(chunk_gsa, **inputs, impl="triton")
    v = inputs["v"].expand_as(out)
    place = torch.arange(80) % chunk_length(dtype, 64)
    steep = 50 * (place + 1) >= BAND[dtype]  # beyond the first band of a chunk
    assert steep.sum() >= 78
    assert torch.equal(out[:, steep], v[:, steep])
    torch.testing.assert_close(out, v, rtol=torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("part", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_on_the_borders_of_bands_belong_to_one(dtype, part):
    inputs = draw(1, 80, dtype=dtype, strength=True, state=True)
    jumps = torch.arange(80, device=DEVICE) % 5 == 0
    inputs["g"] = torch.where(jumps[:, None, None], -BAND[dtype] / part, 0.0).expand(1, 80, 1, 10)
    check(inputs, through_state=True, vanishes=("dk0", "dv0"), scale=0.3)


@pytest.mark.parametrize("between", BETWEEN)
def test_a_query_that_is_not_a_number_shows(between):
    inputs = draw(1, 70, 2, 2)
    inputs["q"][0, 3, 0, 0] = float("nan")
    out, *_ = call(chunk_gsa, **inputs, between=between, impl="triton")
    assert out[0, 3, 0].isnan().all()
    assert out[0, 4:].isfinite().all()


def run_all(inputs, **form):
    """Return all results and gradients, also through the state if there is one."""
    through = inputs["k0"] is not None
    fn = lambda **x: call(chunk_gsa, **x, **form, impl="triton")  # noqa: E731
    return pull(fn, inputs, through_state=through)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("state", [False, True])
def test_kept_memories_and_repeats_change_no_bit(state, packed):
    borders = torch.tensor([0, 30, 70], device=DEVICE) if packed else None
    inputs = draw(1, 70, state=2 if packed and state else state, strength=True)
    once = run_all(inputs, cu_seqlens=borders)
    for keep_states in (False, True):
        again = run_all(inputs, cu_seqlens=borders, keep_states=keep_states)
        assert all(torch.equal(once[name], again[name]) for name in once), keep_states


def test_where_both_gradients_do_not_fit_in_shared_memory_each_is_computed_alone(monkeypatch):
    inputs, launch, alone = draw(1, 70), launches.launch, []
    wanted = run_all(inputs)

    def launch_less(kernel, grid, *given, **constants):
        if kernel is launches.tokens_kernel:
            left, right = given[14:16]
            if left is not None and right is not None:
                raise OutOfResources(2, 1, "shared memory")
            alone.append("right" if left is None else "left")
        launch(kernel, grid, *given, **constants)

    monkeypatch.setattr(launches, "launch", launch_less)
    found = run_all(inputs)
    assert alone == ["left", "right", "left", "right"], "the outputs, dv, dq and dk"
    assert all(torch.equal(found[name], x) for name, x in wanted.items())


def test_rows_do_not_depend_on_their_batch():
    inputs = draw(3, 66, state=True)
    inputs["g"][1] = mix(inputs["g"][1])
    whole = run_all(inputs)
    for row in range(3):
        alone = {name: x if x is None else x[row : row + 1] for name, x in inputs.items()}
        fn = lambda **x: call(chunk_gsa, **x, impl="triton")  # noqa: E731
        for name, x in zip(("out", "final k", "final v"), fn(**alone), strict=True):
            assert torch.equal(whole[name][row : row + 1], x), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_leaves_the_past_bit_equal(dtype):
    inputs = draw(1, 80, dtype=dtype, strength=True)
    out = call(chunk_gsa, **inputs, impl="triton")[0]
    for t in (1, 25, 64):
        for name in "qkvgs":
            other = inputs[name].clone()
            other[:, t:] -= 3.0  # more bands, if of gates
            changed = call(chunk_gsa, **{**inputs, name: other}, impl="triton")[0]
            assert torch.equal(changed[:, :t], out[:, :t]), f"{name} at {t} reached the past"
            assert not torch.equal(changed[:, t:], out[:, t:]), f"{name} at {t} reached nothing"


def test_inputs_may_be_parts_of_wider_tensors_and_expanded():
    inputs = draw(2, 70, 2, 2, 16, 16)
    wide = torch.cat([inputs[name].flatten(2) for name in "qkv"], -1)
    parts = dict(zip("qkv", (x.unflatten(-1, (2, -1)) for x in wide.split(32, -1)), strict=True))
    g = inputs["g"][:1, :1].expand(2, 70, -1, -1)
    ours = call(chunk_gsa, **parts, g=g, impl="triton")
    ref = call(chunk_gsa, **{**inputs, "g": g.contiguous()}, impl="triton")
    assert all(torch.equal(x, y) for x, y in zip(ours, ref, strict=True))


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("T", "state"), [(1000, True), (16_384, False)])
def test_on_a_gpu_at_the_papers_widths(T, state, dtype):
    inputs = draw(1, T, 4, 4, 512, 512, 64, dtype=dtype, state=state)
    check(inputs, through_state=state, truth=torch.float32, scale=512**-0.5)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("HQ", "H", "K", "V", "M"),
    [
        (4, 4, 32, 32, 16),
        (8, 2, 64, 64, 32),
        (4, 2, 128, 128, 64),
        (2, 1, 256, 256, 128),
        (2, 2, 512, 512, 128),
        (3, 1, 96, 160, 100),
        (2, 2, 512, 32, 20),
    ],
)
def test_on_a_gpu_every_width_in_every_dtype(HQ, H, K, V, M, dtype):
    inputs = draw(2, 300, HQ, H, K, V, M, dtype=dtype)
    if dtype == torch.float16 and M > 64:
        with pytest.raises(ValueError, match=r"does not support float16 with M = \d+ on a GPU"):
            run_all(inputs)
    else:
        check(inputs, scale=K**-0.5)


@gpu
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("strength", [False, True])
def test_on_a_gpu_every_way_between_the_passes(strength, between):
    # The slope of ReLU jumps where a logit is rounded across zero: in float32 hardly any is.
    dtype = torch.float32 if between == "relu" else torch.bfloat16
    inputs = draw(2, 500, 4, 2, 64, 64, 64, dtype=dtype, strength=strength, state=True)
    check(inputs, through_state=True, between=between, scale=0.05)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("gate", [0.0, -1e-4, -0.3, -1.0, -50.0, "mixture"])
def test_on_a_gpu_extreme_gates(gate, dtype):
    inputs = draw(1, 300, 2, 1, 64, 64, 64, dtype=dtype, state=True)
    g = inputs["g"]
    inputs["g"] = mix(g) if gate == "mixture" else torch.full_like(g, gate)
    vanishes = ("dq", "dk", "dg", "dk0", "dv0") if gate == -50.0 else ()
    check(inputs, through_state=True, vanishes=vanishes, scale=0.125)


@gpu
def test_on_a_gpu_packed_in_bfloat16():
    lengths = [0, 900, 1, 5000, 63, 2200, 0]
    borders = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda")
    inputs = draw(1, sum(lengths), 4, 2, 64, 96, 64, dtype=torch.bfloat16, state=len(lengths))
    check(inputs, through_state=True, cu_seqlens=borders, scale=0.125)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_beyond_65536_tokens(dtype):
    inputs = draw(1, 70_001, 2, 1, 32, 32, 16, dtype=dtype)
    check(inputs, scale=32**-0.5)


@gpu
@pytest.mark.parametrize("state", [False, True])
def test_on_a_gpu_rows_do_not_depend_on_their_batch(state):
    inputs = draw(8, 1000, 4, 2, 128, 128, 64, dtype=torch.bfloat16)
    inputs["g"][1] = mix(inputs["g"][1])
    alone = {name: x if x is None else x[1:2] for name, x in inputs.items()}
    dout = normal(8, 1000, 4, 128, seed=20).to(torch.bfloat16)

    def run(x, dout, keep_states):
        fn = lambda **x: call(chunk_gsa, **x, keep_states=keep_states, impl="triton")[0]  # noqa: E731
        return grads(fn, {name: y for name, y in x.items() if y is not None}, dout)

    results, again = run(inputs, dout, state), run(inputs, dout, not state)
    row = run(alone, dout[1:2], state)
    assert torch.equal(results[0], again[0])
    assert torch.equal(results[0][1:2], row[0])
    for name, x in results[1].items():
        assert torch.equal(x, again[1][name]), name
        assert torch.equal(x[1:2], row[1][name]), name


@gpu
def test_on_a_gpu_a_change_leaves_the_past_bit_equal():
    inputs = draw(1, 400, 2, 2, 128, 128, 64, dtype=torch.bfloat16)
    out = call(chunk_gsa, **inputs, impl="triton")[0]
    for t in (1, 100, 128, 300):
        for name in "qkvg":
            other = inputs[name].clone()
            other[:, t:] -= 3.0
            changed = call(chunk_gsa, **{**inputs, name: other}, impl="triton")[0]
            assert torch.equal(changed[:, :t], out[:, :t]), f"{name} at {t} reached the past"
            assert not torch.equal(changed[:, t:], out[:, t:]), f"{name} at {t} reached nothing"


@gpu
def test_on_a_gpu_a_new_length_compiles_nothing():
    compiled = []

    def train(B, T):
        run_all(draw(B, T, 4, 2, 64, 64, 32, dtype=torch.bfloat16))

    for T in (20, 50, 100):  # chunks of each length
        train(1, T)
    train(1, 5000)  # several segments
    hooks, before = triton.knobs.runtime, triton.knobs.runtime.jit_cache_hook
    hooks.jit_cache_hook = lambda **call: compiled.append(call["fn"].name)
    try:
        for B, T in ((1, 1), (3, 2048), (1, 16_001), (2, 4097)):
            train(B, T)
        assert not compiled
        run_all(draw(1, 100, 4, 2, 64, 64, 16, dtype=torch.bfloat16))
        assert compiled, "the hook sees a compilation"
    finally:
        hooks.jit_cache_hook = before


@gpu
def test_on_a_gpu_the_reference_does_what_the_kernels_cannot():
    inputs = draw(1, 70, 2, 1, M=129)
    ours, ref = (call(chunk_gsa, **inputs, impl=impl) for impl in ("auto", "reference"))
    assert all(torch.equal(x, y) for x, y in zip(ours, ref, strict=True))
