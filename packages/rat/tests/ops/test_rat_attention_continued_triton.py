"""RAT attention that continues a state, by Triton kernels: all gradients against the reference."""

from itertools import product

import pytest
import torch
from mezzo_core.testing import assert_close, grads
from mezzo_rat.ops.rat_attention import (
    RATState,
    chunk_rat_attention,
    chunk_rat_attention_projected,
    init_state,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
gpu = pytest.mark.gpu


def draw(B, T, H, G, D, *, slots, z=True, bias=True, seed=0):
    """Return the tensors of a call: q, k, v, g, z, the bias, and a state with `slots` slots."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (B, T, G, D), "k": (B, T, G, D), "v": (B, T, H, D), "g": (B, T, H, D)}
    shapes |= {"z": (B, T, H, D)} if z else {}
    shapes |= {"gate_bias": (H, D)} if bias else {}
    shapes |= {"state_k": (B, H, D), "state_v": (B, H, D)}
    shapes |= {"state_k_ends": (B, slots, H, D), "state_v_ends": (B, slots, H, D)}
    return {n: torch.randn(s, generator=generator).to(DEVICE) for n, s in shapes.items()}


def run(inputs, dout, *, seen, added=None, **form):
    """Return the output, the tensors of the state, and the gradients of all inputs by name."""

    def continued(state_k, state_v, state_k_ends, state_v_ends, **x):
        state = RATState(state_k, state_v, state_k_ends, state_v_ends, seen)
        out, state = chunk_rat_attention(**x, initial_state=state, lengths=added, **form)
        for held in state:
            assert held.untyped_storage().nbytes() == held.nbytes, "it keeps more than it holds"
        return out, *state[:4]

    outputs, found = grads(continued, inputs, dout)
    return dict(zip(("out", *RATState._fields), outputs, strict=False)), found


def check(inputs, seen, added=None, *, L, dtype=torch.float32, **form):
    """Compare with the reference in float64 what the kernels compute, by the numerics rule."""
    B, T, H, D = inputs["v"].shape
    seen = torch.tensor(seen, device=DEVICE)
    given = torch.full_like(seen, T) if added is None else torch.tensor(added, device=DEVICE)
    slots = max(-(-(int(seen.max()) + T) // L), inputs["state_k_ends"].shape[1])
    # Not compared, as nobody reads them: padding, slots of later chunks, k and v of no open chunk.
    real = (torch.arange(T, device=DEVICE) < given[:, None])[..., None, None]
    begun = (torch.arange(slots, device=DEVICE) * L < (seen + given)[:, None])[..., None, None]
    is_open = ((given > 0) | (seen % L > 0))[:, None, None]
    read = {"out": real, "k": is_open, "v": is_open, "k_ends": begun, "v_ends": begun}
    shapes = [(B, T, H, D), *[(B, H, D)] * 2, *[(B, slots, H, D)] * 2]
    generator = torch.Generator().manual_seed(1)
    dout = [
        (torch.randn(shape, generator=generator).to(DEVICE) * where).to(dtype)
        for shape, where in zip(shapes, read.values(), strict=True)
    ]
    call = {"seen": seen, "added": None if added is None else given, "chunk_size": L, **form}
    inputs = {name: x if name in FLOAT32 else x.to(dtype) for name, x in inputs.items()}

    def results(impl, inputs):
        outputs, found = run(inputs, dout, **call, impl=impl)
        held = {name: outputs[name].where(where, 0) for name, where in read.items()}
        return held | {f"d{name}": gradient for name, gradient in found.items()}

    ours = results("triton", inputs)
    low = results("reference", inputs) if dtype.itemsize == 2 else {}
    for name, truth in results("reference", {n: x.double() for n, x in inputs.items()}).items():
        rtol = 8e-3 if low and name in ("dg", "dz", "dgate_bias") else LOW[dtype]
        # Some gradients are zero but for rounding, such as dq in a first chunk: hence atol.
        assert_close(name, ours[name], truth, rtol=rtol, low=low.get(name), factor=3, atol=1e-6)


LOW = {torch.float16: 5e-3, torch.bfloat16: 5e-3, torch.float32: 1e-5}
FLOAT32 = ("state_k", "state_v", "gate_bias")

CASES = {
    # name: B, T, H, G, L, seen, added, rope
    "inside a chunk": (1, 21, 2, 1, 8, [13], None, "chunk"),
    "at a border": (1, 16, 2, 1, 8, [16], None, "token"),
    "closing a chunk": (1, 3, 2, 2, 8, [13], None, "token"),
    "one token": (2, 1, 4, 2, 4, [7, 8], None, "chunk"),
    "an empty state": (1, 19, 6, 2, 8, [0], None, "token"),
    "rows apart": (3, 20, 2, 1, 4, [0, 9, 16], None, "chunk"),
    "padding": (4, 9, 4, 2, 4, [5, 8, 7, 0], [9, 0, 4, 3], "chunk"),
    "no tokens": (3, 6, 2, 1, 4, [5, 4, 0], [0, 0, 0], "token"),
    "chunks of one token": (2, 7, 2, 1, 1, [3, 0], [7, 4], None),
    "one long chunk": (2, 9, 2, 1, 2**31 - 1, [6, 0], None, "chunk"),
    "many old ends": (2, 70, 2, 1, 2, [150, 3], None, "chunk"),
}


@pytest.mark.parametrize("case", CASES)
def test_output_state_and_gradients_equal_the_reference(case):
    B, T, H, G, L, seen, added, rope = CASES[case]
    inputs = draw(B, T, H, G, 32, slots=-(-max(seen) // L))
    check(inputs, seen, added, L=L, rope=rope)


@pytest.mark.parametrize("spare", [0, 1, 5, 40])
def test_slots_that_are_there_already_may_hold_anything(spare):
    inputs, seen, L = draw(2, 11, 2, 1, 32, slots=4 + spare), [13, 5], 4
    for name, (row, n) in product(("state_k_ends", "state_v_ends"), enumerate(seen)):
        inputs[name][row, n // L :] = NAN
    check(inputs, seen, [11, 2], L=L)


@pytest.mark.parametrize(("z", "bias"), [(False, False), (True, False), (False, True)])
def test_without_gate_or_bias(z, bias):
    check(draw(2, 11, 4, 2, 64, slots=4, z=z, bias=bias), [13, 5], [11, 6], L=4, rope="token")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_16_bits(dtype):
    inputs = draw(2, 35, 4, 2, 32, slots=4)
    check(inputs, [30, 5], [35, 20], L=8, dtype=dtype)


@pytest.mark.parametrize("wanted", ["out", *RATState._fields[:4]])
def test_one_result_alone_has_right_gradients(wanted):
    """The others then have no gradient at all, as at the end of a truncated backpropagation."""
    inputs = draw(2, 6, 2, 1, 32, slots=2)
    seen, found = torch.tensor([5, 8], device=DEVICE), {}
    for impl in ("triton", "reference"):
        names = ("out", *RATState._fields[:4])
        dout = [torch.ones((), device=DEVICE) if name == wanted else None for name in names]

        def total(x):
            return x[:, :3].sum() if wanted.endswith("ends") else x.sum()

        def alone(impl=impl, **x):
            state = RATState(*(x.pop(f"state_{n}") for n in RATState._fields[:4]), seen)
            out, state = chunk_rat_attention(**x, initial_state=state, chunk_size=4, impl=impl)
            return tuple(total(each) for each in (out, *state[:4]))

        found[impl] = grads(alone, inputs, dout)[1]
    for name, truth in found["reference"].items():
        assert_close(f"d{name}", found["triton"][name], truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rope", ["chunk", "token"])
@pytest.mark.parametrize("lengths", [(11, 12), (8, 15), (1, 1, 21), (5, 3, 8, 7)])
def test_segments_have_the_gradients_of_the_whole(lengths, rope):
    H, G, D, T = 2, 1, 32, 23
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "zvgqk": torch.randn(2, T, (3 * H + 2 * G) * D, generator=generator).to(DEVICE),
        "gate_bias": torch.randn(H, D, generator=generator).to(DEVICE),
    }
    dout = torch.randn(2, T, H, D, generator=generator).to(DEVICE)
    form = {"num_heads": H, "num_groups": G, "chunk_size": 4, "rope": rope, "impl": "triton"}

    def segments(zvgqk, gate_bias):
        state = init_state(2, H, D, dtype=torch.float32, device=torch.device(DEVICE))
        outs = []
        for x in zvgqk.split(lengths, 1):
            out, state = chunk_rat_attention_projected(
                x, gate_bias=gate_bias, initial_state=state, **form
            )
            outs.append(out)
        return torch.cat(outs, 1)

    whole, truth = grads(lambda **x: chunk_rat_attention_projected(**x, **form).out, inputs, dout)
    out, found = grads(segments, inputs, dout)
    assert_close("out", out, whole, rtol=1e-5)
    for name, gradient in truth.items():
        assert_close(f"d{name}", found[name], gradient, rtol=1e-5)


def test_padding_that_is_not_a_number_reaches_no_gradient():
    inputs = draw(2, 9, 2, 1, 32, slots=2)
    seen, added = (torch.tensor(n, device=DEVICE) for n in ([5, 8], [3, 0]))
    real = (torch.arange(9, device=DEVICE) < added[:, None])[..., None, None]
    spoiled = {n: x.where(real, NAN) if n in "qkvgz" else x for n, x in inputs.items()}
    dout = [torch.ones(2, 9, 2, 32, device=DEVICE) * real, *[None] * 4]
    form = {"seen": seen, "added": added, "chunk_size": 4, "impl": "triton"}
    (clean, expected), (ours, found) = (run(x, dout, **form) for x in (inputs, spoiled))
    assert ours["out"].isfinite().all(), "padding reaches the layers above"
    assert torch.equal(ours["out"] * real, clean["out"] * real)
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
        if name in "qkvgz":
            assert (gradient.where(~real, 0) == 0).all(), "padding has no gradient"


def test_an_unused_open_chunk_may_hold_anything():
    inputs = draw(1, 5, 2, 1, 32, slots=2)
    spoiled = {n: x * NAN if n in ("state_k", "state_v") else x for n, x in inputs.items()}
    seen = torch.tensor([8], device=DEVICE)
    dout = [torch.ones(1, 5, 2, 32, device=DEVICE), *[None] * 4]
    form = {"seen": seen, "chunk_size": 4, "impl": "triton"}
    (_, expected), (_, found) = (run(x, dout, **form) for x in (inputs, spoiled))
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
    assert not found["state_k"].any()
    assert found["state_k_ends"].any()


@pytest.mark.any_shapes
def test_gradients_are_the_same_compiled_and_computed_again():
    inputs = draw(2, 9, 2, 1, 32, slots=2)
    seen = torch.tensor([5, 8], device=DEVICE)

    def continued(state_k, state_v, state_k_ends, state_v_ends, **x):
        state = RATState(state_k, state_v, state_k_ends, state_v_ends, seen)
        out, state = chunk_rat_attention(**x, initial_state=state, chunk_size=4, impl="triton")
        return out, state.k, state.v, state.k_ends, state.v_ends

    def again(**x):
        names, values = zip(*x.items(), strict=True)
        call = lambda *values: continued(**dict(zip(names, values, strict=True)))  # noqa: E731
        return torch.utils.checkpoint.checkpoint(call, *values, use_reentrant=False)

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    outputs = continued(**inputs)
    dout = [torch.ones_like(x) for x in outputs]
    _, truth = grads(continued, inputs, dout)
    for fn in (torch.compile(continued, fullgraph=True, backend=backend), again):
        out, found = grads(fn, inputs, dout)
        assert all(torch.equal(x, ref) for x, ref in zip(out, outputs, strict=True))
        assert all(torch.equal(found[name], truth[name]) for name in truth)


@gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("L", "rope"), [(16, "chunk"), (64, "token")])
def test_on_a_gpu(L, rope, dtype, D):
    seen, added = [3000, 64, 0, 777], [500, 1, 333, 0]
    inputs = draw(4, 500, 4, 2, D, slots=-(-3500 // L))
    check(inputs, seen, added, L=L, rope=rope, dtype=dtype)
