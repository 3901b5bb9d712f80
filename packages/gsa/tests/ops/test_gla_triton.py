"""Gated linear attention's kernels against the definition: in the interpreter, or on a GPU."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from mezzo_core.testing import assert_close, grads
from mezzo_gsa.ops.gla import chunk_gla, op
from mezzo_gsa.ops.gla.reference import recurrent_gla_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = pytest.mark.gpu


def draw(B, T, HQ=2, H=1, K=16, V=24, *, gate="channel", states=None, dtype=torch.float32, seed=0):
    """Draw inputs by name; `states` rows of initial state, B of them if None."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    inputs = {
        "q": normal(B, T, HQ, K).to(dtype),
        "k": normal(B, T, H, K).to(dtype),
        "v": normal(B, T, H, V).to(dtype),
        "g": F.logsigmoid(2 * normal(B, T, H, K if gate == "channel" else 1)),
        "initial_state": normal(B if states is None else states, H, K, V),
    }
    return {name: x.to(DEVICE) for name, x in inputs.items()}


def check(inputs, cu_seqlens=None, yardstick=True):
    """Compare both results and all gradients with the definition, by the numerics rule.

    The yardstick is the definition with states of the inputs' own dtype.
    """
    dtype = inputs["q"].dtype
    scale = inputs["q"].shape[3] ** -0.5
    generator = torch.Generator().manual_seed(1)
    shape = (*inputs["q"].shape[:3], inputs["v"].shape[3])
    dout = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    dlast = torch.randn(inputs["initial_state"].shape, generator=generator).to(DEVICE)

    def run(op, cast):
        x = {name: cast(x) for name, x in inputs.items()}
        (out, last), found = grads(op, x, (cast(dout), cast(dlast)))
        return {"out": out, "final_state": last, **{f"d{n}": x for n, x in found.items()}}

    def kernels(**x):
        return tuple(chunk_gla(**x, scale=scale, cu_seqlens=cu_seqlens, impl="triton"))

    def definition(**x):
        return recurrent_gla_reference(**x, scale=scale, cu_seqlens=cu_seqlens)

    ours, truth = run(kernels, lambda x: x), run(definition, lambda x: x.double())
    is_low = dtype != torch.float32
    low = run(definition, lambda x: x.to(dtype)) if is_low and yardstick else {}
    for name, expected in truth.items():
        rtol = (8e-3 if name == "dg" else 5e-3) if is_low else 1e-5
        factor = 2 if name == "out" else 3  # memories are sums, as gradients are
        assert_close(
            name, ours[name], expected, rtol=rtol, low=low.get(name), factor=factor, atol=1e-6
        )


SHAPES = [(1, 1, 1, 16, 16), (63, 2, 1, 32, 16), (65, 1, 1, 40, 72), (130, 4, 2, 8, 24)]
HERE = [(1, *SHAPES[0]), (2, *SHAPES[1]), (1, *SHAPES[2]), (1, *SHAPES[3])]


@pytest.mark.parametrize(
    ("gate", "dtype"),
    [
        ("channel", torch.float32),
        ("channel", torch.float16),
        ("channel", torch.bfloat16),
        ("head", torch.float16),
        ("head", torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("B", "T", "HQ", "H", "K", "V"), HERE)
def test_results_and_gradients_equal_the_definition(B, T, HQ, H, K, V, gate, dtype):
    check(draw(B, T, HQ, H, K, V, gate=gate, dtype=dtype))


@pytest.mark.parametrize("gate", ["channel", "head"])
def test_heads_of_several_tiles_equal_the_definition(gate):
    check(draw(1, 5, 1, 1, 136, 200, gate=gate))


@pytest.mark.parametrize(("gate", "packed"), [("channel", False), ("head", False), ("head", True)])
def test_states_flow_from_segment_to_segment(gate, packed, monkeypatch):
    monkeypatch.setattr("mezzo_gsa.ops.chunking.chunks.SEGMENT", 128)
    borders = torch.tensor([0, 3, 200, 200, 330], device=DEVICE) if packed else None
    inputs = draw(1, 330, 1, 1, 16, 16, gate=gate, states=4 if packed else None)
    inputs["g"] *= 0.03
    check(inputs, borders)


@pytest.mark.parametrize("gate", ["channel", "head"])
@pytest.mark.parametrize("lengths", [[0, 16, 1, 65], [64, 64, 0]])
def test_packed_sequences_equal_the_definition(lengths, gate):
    borders = torch.tensor([0, *itertools.accumulate(lengths), sum(lengths)], device=DEVICE)
    check(draw(1, sum(lengths), gate=gate, states=len(lengths) + 1), borders)


@pytest.mark.parametrize("gate", ["channel", "head"])
@pytest.mark.parametrize("value", [0.0, -1e-4, -50.0, float("-inf")])
def test_extreme_gates_equal_the_definition(value, gate):
    inputs = draw(1, 66, gate=gate)
    inputs["g"] = torch.full_like(inputs["g"], value)
    check(inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gate", ["channel", "head"])
def test_mixtures_of_extreme_gates_equal_the_definition(gate, dtype):
    inputs = draw(1, 80, 1, gate=gate, dtype=dtype)
    values = torch.tensor([0.0, -1e-4, -50.0, -1e4, float("-inf")])
    picks = torch.randint(5, inputs["g"].shape, generator=torch.Generator().manual_seed(0))
    inputs["g"] = values[picks].to(DEVICE)
    inputs["g"][:, ::3] = -1e-4
    check(inputs, yardstick=False)  # some results are zero, where a yardstick would allow no error


@pytest.mark.parametrize("gate", ["channel", "head"])
def test_a_change_leaves_the_past_bit_equal(gate):
    inputs = draw(1, 66, 1, gate=gate)
    out = chunk_gla(**inputs, impl="triton").out
    for t in (1, 20, 50, 64):
        for name in ("q", "k", "v", "g") if t == 50 else ("g",):
            other = inputs[name].clone()
            other[:, t:] -= 1.0
            changed = chunk_gla(**{**inputs, name: other}, impl="triton").out
            assert torch.equal(changed[:, :t], out[:, :t]), f"{name} at {t} reached the past"
            assert not torch.equal(changed[:, t:], out[:, t:]), f"{name} at {t} reached nothing"


@pytest.mark.parametrize("gate", ["channel", "head"])
def test_rows_do_not_depend_on_their_batch_and_repeats_are_bit_equal(gate):
    inputs = draw(2, 5, gate=gate)

    def run(**x):
        out, found = grads(lambda **x: tuple(chunk_gla(**x, impl="triton")), x, tuple(
            torch.ones(()).expand_as(y).to(DEVICE) for y in chunk_gla(**x, impl="triton")
        ))  # fmt: skip
        return [*out, *found.values()]

    whole = run(**inputs)
    alone = run(**{name: x[1:2] for name, x in inputs.items()})
    for a, b, c in zip(whole, alone, run(**inputs), strict=True):
        assert torch.equal(a[1:2], b)
        assert torch.equal(a, c)


def test_inputs_may_be_parts_of_wider_tensors_and_expanded():
    inputs = draw(2, 70, 2, 2, gate="head")
    wide = torch.cat([inputs[n].flatten(2) for n in ("q", "k", "v")], -1)
    parts = [x.unflatten(-1, (2, -1)) for x in wide.split([32, 32, 48], -1)]
    g = inputs["g"][:1, :1].expand(2, 70, -1, -1)
    state = inputs["initial_state"].mT.contiguous().mT
    out = chunk_gla(*parts, g, initial_state=state, impl="triton")
    ref = chunk_gla(
        *(inputs[n] for n in ("q", "k", "v")), g.contiguous(),
        initial_state=inputs["initial_state"], impl="triton",
    )  # fmt: skip
    assert torch.equal(out.out, ref.out)
    assert torch.equal(out.final_state, ref.final_state)


def test_gradients_of_single_tokens_come_in_turned_batches():
    inputs = draw(3, 1, 2, 2)
    dout = torch.randn(1, 3, 2, 24).transpose(0, 1).to(DEVICE)  # contiguous, strides (48, 144, 24)
    truth, found = (
        grads(lambda i=impl, **x: chunk_gla(**x, impl=i).out, inputs, dout)[1]
        for impl in ("reference", "triton")
    )
    for name, expected in truth.items():
        assert_close(f"d{name}", found[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("gate", "packed"), [("channel", False), ("head", True)])
def test_the_registered_op_keeps_its_contract(gate, packed):
    inputs = draw(1, 5, gate=gate, states=2 if packed else 1)
    borders = torch.tensor([0, 3, 5], device=DEVICE) if packed else None
    values = [x.requires_grad_() for x in inputs.values()]
    torch.library.opcheck(op.gla, (*values, borders, 0.5))
    torch.library.opcheck(op.gla, (*values[:4], None, borders, 0.5))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.any_shapes
def test_it_compiles_without_a_graph_break(packed):
    torch._dynamo.reset()
    inputs = draw(1, 20, states=2 if packed else 1)
    form = {"cu_seqlens": torch.tensor([0, 13, 20], device=DEVICE)} if packed else {}
    fn = lambda **x: chunk_gla(**x, **form, impl="triton").out  # noqa: E731
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    dout = torch.randn(1, 20, 2, 24).to(DEVICE)
    (out, found), (ref, truth) = (grads(f, inputs, dout) for f in (compiled, fn))
    assert torch.equal(out, ref)
    for name, expected in truth.items():
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "float64; supported: float32, bfloat16, float16"),
        ({"K": 513}, "heads of K = 513, V = 24; supported: K up to 512, V up to 1024"),
        ({"V": 1025}, "heads of K = 16, V = 1025; supported"),
        ({"T": 0}, "empty tensors"),
    ],
)
def test_what_the_kernels_cannot_do_is_said(change, message):
    inputs = draw(**{"B": 1, "T": 4, **change})
    with pytest.raises(ValueError, match=f'impl="triton" does not support .*{message}'):
        chunk_gla(**inputs, impl="triton")


@pytest.mark.parametrize(("gate", "K", "V"), [("channel", 512, 24), ("head", 24, 1024)])
def test_the_widest_heads_equal_the_definition(gate, K, V):
    check(draw(1, 5, 1, 1, K, V, gate=gate))


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gate", ["channel", "head"])
@pytest.mark.parametrize(
    ("T", "HQ", "H", "K", "V"),
    [
        *SHAPES,
        (257, 4, 4, 256, 512),
        (130, 1, 1, 512, 1024),
        (500, 8, 2, 64, 64),
        (300, 2, 2, 128, 128),
    ],
)
def test_on_a_gpu_results_and_gradients_equal_the_definition(T, HQ, H, K, V, gate, dtype):
    check(draw(2, T, HQ, H, K, V, gate=gate, dtype=dtype))


@gpu
@pytest.mark.parametrize("gate", ["channel", "head"])
def test_on_a_gpu_long_and_packed_rows_equal_the_chunk_form(gate):
    lengths = [5000, 0, 1, 63, 60_000, 937]
    borders = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)
    inputs = draw(1, sum(lengths), 2, 1, 64, 64, gate=gate, states=6)
    dout = torch.randn(1, sum(lengths), 2, 64, device=DEVICE)
    (out, found), (ref, truth) = (
        grads(
            lambda i=impl, **x: chunk_gla(**x, cu_seqlens=borders, impl=i).out,
            {name: x.to(dtype) for name, x in inputs.items()},
            dout,
        )
        for impl, dtype in (("triton", torch.float32), ("reference", torch.float64))
    )
    assert_close("out", out, ref, rtol=1e-5)
    for name, expected in truth.items():
        assert_close(f"d{name}", found[name], expected, rtol=1e-5)
