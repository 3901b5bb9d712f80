"""RAT attention's Triton kernels against the reference: here in the interpreter, or on a GPU."""

import itertools

import pytest
import torch
import triton
from mezzo_core.testing import assert_close, grads
from mezzo_rat.ops.rat_attention import (
    RATState,
    chunk_rat_attention,
    chunk_rat_attention_projected,
    init_state,
    reserve,
    step_rat_attention_,
)
from mezzo_rat.ops.rat_attention.arguments import Form
from mezzo_rat.ops.rat_attention.triton import launches
from torch._subclasses import FakeTensorMode

from .inputs import DEVICE, draw

LOW = {torch.float16: 5e-3, torch.bfloat16: 5e-3, torch.float32: 1e-5}
gpu = pytest.mark.gpu


def check(inputs, *, H, G, cu_seqlens=None, **form):
    """Compare output and gradients with the reference in float32, by the numerics rule."""
    form = {"num_heads": H, "num_groups": G, "cu_seqlens": cu_seqlens, **form}
    dtype = inputs["zvgqk"].dtype
    B, T, W = inputs["zvgqk"].shape
    D = W // (3 * H + 2 * G)
    dout = torch.randn(B, T, H, D, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def run(impl, zvgqk):
        fn = lambda **x: chunk_rat_attention_projected(**x, **form, impl=impl).out  # noqa: E731
        out, found = grads(fn, {**inputs, "zvgqk": zvgqk}, dout.to(zvgqk.dtype))
        heads = [H * D] * 3 + [G * D] * 2
        parts = dict(zip("zvgqk", found["zvgqk"].split(heads, -1), strict=True))
        return {"out": out, **{f"d{n}": x for n, x in parts.items()}, "dbias": found["gate_bias"]}

    ours = run("triton", inputs["zvgqk"])
    # In a first chunk a query sees one key, so dq and dk are zero but for rounding.
    atol = 1e-6 if dtype == torch.float32 or form["chunk_size"] + 1 < T else 2e-3
    unmeasured = ["dbias"] if form["chunk_size"] < T else ["dbias", "dq", "dk"]
    ref = run("reference", inputs["zvgqk"].float())
    low = None if dtype == torch.float32 else run("reference", inputs["zvgqk"])
    for name, truth in ref.items():
        rtol = 8e-3 if name in ("dg", "dz", "dbias") and low else LOW[dtype]
        yardstick = None if low is None or name in unmeasured else low[name]
        assert_close(name, ours[name], truth, rtol=rtol, low=yardstick, factor=3, atol=atol)


SHAPES = [  # B, T, L, H, G, D, rope
    (2, 1, 16, 2, 1, 32, "chunk"),
    (1, 63, 16, 4, 2, 32, "chunk"),
    (1, 100, 7, 2, 2, 32, "token"),
    (2, 65, 64, 6, 2, 32, "chunk"),
    (2, 40, 1, 2, 1, 64, None),
    (2, 33, 128, 2, 1, 32, "token"),
]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [  # every shape in float32; both 16-bit dtypes with one chunk and with several
        *((shape, torch.float32) for shape in SHAPES),
        *itertools.product(SHAPES[1::4], [torch.float16, torch.bfloat16]),
        (SHAPES[2], torch.bfloat16),
        (SHAPES[4], torch.float16),
    ],
    ids=str,
)
def test_output_and_gradients_equal_the_reference(shape, dtype):
    B, T, L, H, G, D, rope = shape
    inputs = draw(B, T, H, G, D, dtype=dtype)
    check(inputs, H=H, G=G, chunk_size=L, rope=rope, rope_base=500.0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("L", [2**27, 2**31 - 1, 2**40, 2**63 - 1])
def test_a_chunk_far_longer_than_the_row_is_one_chunk(L, packed):
    inputs = draw(1, 40, 2, 1, 32)
    borders = torch.tensor([0, 15, 40], device=DEVICE) if packed else None
    check(inputs, H=2, G=1, chunk_size=L, cu_seqlens=borders)


@pytest.mark.parametrize("rope", ["chunk", "token"])
@pytest.mark.parametrize("lengths", [[40, 0, 1, 35], [0, 16, 17], [7]])
def test_packed_sequences_equal_the_reference(lengths, rope):
    borders = torch.tensor([0, *itertools.accumulate(lengths), sum(lengths)], device=DEVICE)
    inputs = draw(1, sum(lengths), 2, 1, 32)
    check(inputs, H=2, G=1, chunk_size=16, rope=rope, cu_seqlens=borders)


def test_a_packed_sequence_that_begins_at_a_tiles_last_slot_is_read_by_its_later_chunks():
    first = launches.TILES_FLOAT32[1] - 1
    inputs = draw(1, first + 3, 2, 1, 32)
    borders = torch.tensor([0, first, first + 3], device=DEVICE)
    check(inputs, H=2, G=1, chunk_size=1, cu_seqlens=borders)


@pytest.mark.parametrize("logit", [float("inf"), float("-inf"), 50.0, -50.0, -1e-4])
def test_extreme_gates_equal_the_reference(logit):
    inputs = draw(1, 40, 2, 1, 32, bias=0.0)
    inputs["zvgqk"][..., 128:192] = logit
    check(inputs, H=2, G=1, chunk_size=8)


def test_a_query_that_is_not_a_number_shows_where_no_chunk_has_ended():
    inputs = draw(1, 5, 2, 1, 32)
    inputs["zvgqk"][0, 3, 192] = float("nan")  # q of the group at token 3
    out = chunk_rat_attention_projected(
        **inputs, num_heads=2, num_groups=1, chunk_size=8, impl="triton"
    ).out
    assert out.isnan().all((0, 2, 3)).tolist() == [False, False, False, True, False]


def test_a_gate_that_is_not_a_number_shows():
    inputs = draw(1, 20, 2, 1, 32)
    inputs["zvgqk"][0, 3, 128] = float("nan")  # g of head 0 at token 3
    out = chunk_rat_attention_projected(
        **inputs, num_heads=2, num_groups=1, chunk_size=8, impl="triton"
    ).out
    assert out[0, 3:, 0, 0].isnan().all()
    assert out[0, :, 1].isfinite().all(), "heads are apart"


@pytest.mark.parametrize("offset", [0, 1])
def test_separate_tensors_without_gates_give_the_same(offset):
    draws = torch.Generator().manual_seed(0)
    shapes = {"q": 1, "k": 1, "v": 2, "g": 2}
    inputs = {n: torch.randn(1, 40, H, 32, generator=draws).to(DEVICE) for n, H in shapes.items()}
    # With an offset the gradient is a part of a wider one, and begins at an odd place in memory.
    dout = torch.randn(2560 + offset, generator=draws).to(DEVICE)[offset:].view(1, 40, 2, 32)
    (out, found), (ref, truth) = (
        grads(lambda i=impl, **x: chunk_rat_attention(**x, chunk_size=8, impl=i).out, inputs, dout)
        for impl in ("triton", "reference")
    )
    assert_close("out", out, ref, rtol=1e-5)
    for name in inputs:
        assert_close(f"d{name}", found[name], truth[name], rtol=1e-5)


def test_strided_projections_are_read_in_place():
    inputs = draw(2, 20, 2, 1, 32)
    wide = torch.randn(2, 30, 512, device=DEVICE)
    wide[:, 5:25, 64:512] = 0.0
    strided = wide[:, 5:25, 64 : 64 + inputs["zvgqk"].shape[-1]]
    strided.copy_(inputs["zvgqk"])
    form = {"num_heads": 2, "num_groups": 1, "chunk_size": 8, "impl": "triton"}
    ours = chunk_rat_attention_projected(strided, gate_bias=inputs["gate_bias"], **form).out
    assert torch.equal(ours, chunk_rat_attention_projected(**inputs, **form).out)


def test_a_change_leaves_the_past_bit_equal():
    inputs = draw(1, 50, 2, 1, 32)
    form = {"num_heads": 2, "num_groups": 1, "chunk_size": 8, "impl": "triton"}
    before = chunk_rat_attention_projected(**inputs, **form).out
    inputs["zvgqk"][:, 30:] += 1
    after = chunk_rat_attention_projected(**inputs, **form).out
    assert torch.equal(before[:, :30], after[:, :30])
    assert not torch.equal(before[:, 30:], after[:, 30:])


def test_repeats_are_bit_equal():
    inputs = draw(1, 30, 4, 2, 32)
    form = {"num_heads": 4, "num_groups": 2, "chunk_size": 8, "impl": "triton"}
    runs = [
        grads(
            lambda **x: chunk_rat_attention_projected(**x, **form).out,
            inputs,
            torch.ones(1, 30, 4, 32, device=DEVICE),
        )
        for _ in range(2)
    ]
    (out, found), (again, found_again) = runs
    assert torch.equal(out, again)
    assert all(torch.equal(found[name], found_again[name]) for name in found)


@pytest.mark.parametrize("rope", ["chunk", "token", None])
def test_segments_and_steps_through_a_state_equal_the_whole(rope):
    H, G, D, L = 2, 1, 32, 5
    inputs = draw(2, 23, H, G, D)
    form = {"num_heads": H, "num_groups": G, "chunk_size": L, "rope": rope, "impl": "triton"}
    with torch.no_grad():
        whole = chunk_rat_attention_projected(**inputs, **form).out
        state = init_state(2, H, D, dtype=torch.float32, device=torch.device(DEVICE))
        outputs, start = [], 0
        for length in (3, 2, 9, 1):
            part = inputs["zvgqk"][:, start : start + length]
            out, state = chunk_rat_attention_projected(
                part, gate_bias=inputs["gate_bias"], initial_state=state, **form
            )
            outputs.append(out)
            start += length
        assert state.k_ends.shape[1] == -(-start // L)
        grown = reserve(state, 23 - start, L)
        state = RATState(*(x.clone() for x in grown))
        for t in range(start, 23):
            token = inputs["zvgqk"][:, t : t + 1]
            outputs.append(step_rat_attention_(token, state, gate_bias=inputs["gate_bias"], **form))
    assert_close("out", torch.cat(outputs, 1), whole, rtol=1e-5)
    assert state.lengths.tolist() == [23, 23]


def test_rows_of_different_lengths_equal_the_reference():
    H, G, D, L = 2, 1, 32, 4
    form = {"num_heads": H, "num_groups": G, "chunk_size": L}
    bias = draw(1, 1, H, G, D)["gate_bias"]
    states = {}
    with torch.no_grad():
        for impl in ("triton", "reference"):
            state = init_state(4, H, D, dtype=torch.float32, device=torch.device(DEVICE))
            outs = []
            for call, lengths in enumerate(([7, 0, 4, 1], [0, 3, 5, 2], [1, 1, 9, 6])):
                given = torch.tensor(lengths, device=DEVICE)
                x = draw(4, 9, H, G, D, seed=call)["zvgqk"]
                out, state = chunk_rat_attention_projected(
                    x, gate_bias=bias, initial_state=state, lengths=given, impl=impl, **form
                )
                real = torch.arange(9, device=DEVICE) < given[:, None]
                assert out.isfinite().all(), "padding reaches the layers above"
                outs.append(out[real])
            states[impl] = (torch.cat(outs), state)
    (ours, state), (ref, expected) = states.values()
    assert_close("out", ours, ref, rtol=1e-5)
    assert torch.equal(state.lengths, expected.lengths)
    held = torch.arange(state.k_ends.shape[1], device=DEVICE) < (state.lengths // L)[:, None]
    open_rows = state.lengths % L > 0
    for name in ("k_ends", "v_ends"):
        assert_close(name, getattr(state, name)[held], getattr(expected, name)[held], rtol=1e-5)
    for name in ("k", "v"):
        pair = (getattr(s, name)[open_rows] for s in (state, expected))
        assert_close(name, *pair, rtol=1e-5)


@pytest.mark.parametrize(
    "given",
    [torch.tensor([3, 99, 6, 99])[::2], torch.tensor([6]).expand(2)],
    ids=["every second", "expanded"],
)
def test_lengths_may_have_any_stride(given):
    H, G, D, given = 2, 1, 32, given.to(DEVICE)
    state = init_state(2, H, D, dtype=torch.float32, device=torch.device(DEVICE))
    form = {"num_heads": H, "num_groups": G, "chunk_size": 4, "initial_state": state}
    with torch.no_grad():
        ours, ref = (
            chunk_rat_attention_projected(**draw(2, 9, H, G, D), lengths=given, impl=impl, **form)
            for impl in ("triton", "reference")
        )
    real = torch.arange(9, device=DEVICE) < given[:, None]
    assert_close("out", ours.out[real], ref.out[real], rtol=1e-5)
    assert_close("k", ours.final_state.k, ref.final_state.k, rtol=1e-5)
    assert torch.equal(ours.final_state.lengths, given)


def test_registered_ops_are_sound():
    inputs = draw(1, 9, 2, 1, 32)
    x, bias = (v.requires_grad_() for v in inputs.values())
    ops = torch.ops.mezzo_rat
    form = Form(2, 1, True, 4, "chunk", 1e4, 0.2)
    torch.library.opcheck(ops.rat_attention, (x, bias, None, *form))
    borders = torch.tensor([0, 7, 9], device=DEVICE)
    torch.library.opcheck(ops.rat_attention, (x, bias, borders, *form))
    state = init_state(1, 2, 32, dtype=torch.float32, device=torch.device(DEVICE))
    state = reserve(state, 20, 4)
    *running, lengths = state
    running = [field.clone().requires_grad_() for field in running]
    for added, some_bias in ((9, bias), (5, None)):
        call = (x, some_bias, *running, lengths, torch.tensor([added], device=DEVICE), *form)
        torch.library.opcheck(ops.rat_attention_continued, call)
    x, bias = x.detach(), bias.detach()
    torch.library.opcheck(ops.rat_attention_step_, (x[:, :1], bias, *state, *form))


def test_the_gradients_of_a_continued_state_lie_in_memory_as_torch_compile_is_told():
    x, bias = draw(2, 3, 2, 1, 32).values()
    state = init_state(2, 2, 32, dtype=torch.float32, device=torch.device(DEVICE))
    k, v, k_ends, v_ends, seen = (part.clone() for part in reserve(state, 3, 2))
    form, added = Form(2, 1, True, 2, "chunk", 1e4, 0.2), torch.tensor([3, 2], device=DEVICE)
    op = torch.ops.mezzo_rat.rat_attention_continued
    y, *after, lse = op(x, bias, k, v, k_ends, v_ends, seen, added, *form)
    given = (y, *after, x, bias, k, v, seen, added, y, lse, *after[2:], *form)
    real = torch.ops.mezzo_rat.rat_attention_continued_bwd(*given)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ops.mezzo_rat.rat_attention_continued_bwd(*given)
    for told, found in zip(fake, real, strict=True):
        assert (told.dtype, told.stride()) == (found.dtype, found.stride())


@pytest.mark.any_shapes
def test_compiled_in_one_graph():
    inputs = draw(1, 20, 2, 1, 32)
    form = {"num_heads": 2, "num_groups": 1, "chunk_size": 8, "impl": "triton"}
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"

    def run(**x):
        return chunk_rat_attention_projected(**x, **form).out

    dout = torch.ones(1, 20, 2, 32, device=DEVICE)
    out, found = grads(torch.compile(run, fullgraph=True, backend=backend), inputs, dout)
    ref, truth = grads(run, inputs, dout)
    assert torch.equal(out, ref)
    assert all(torch.equal(found[name], truth[name]) for name in truth)


@pytest.mark.parametrize("shape", [(1, 2, 255), (2, 256)])
@pytest.mark.any_shapes
def test_bad_projections_are_named(shape):
    with pytest.raises(ValueError, match=r"zvgqk must be \(B, T, W\) with W a multiple of 3 H"):
        chunk_rat_attention_projected(torch.zeros(shape), num_heads=2, num_groups=1, chunk_size=4)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("D", [32, 64, 128, 256])
@pytest.mark.parametrize(
    ("T", "L", "H", "G", "rope"),
    [
        (1000, 16, 4, 2, "chunk"),
        (700, 64, 4, 1, "token"),
        (513, 1, 2, 1, None),
        (700, 128, 6, 2, "chunk"),
        (400, 5, 3, 3, "chunk"),
    ],
)
def test_on_a_gpu_in_every_dtype(T, L, H, G, D, rope, dtype):
    check(draw(2, T, H, G, D, dtype=dtype), H=H, G=G, chunk_size=L, rope=rope)


@gpu
@pytest.mark.parametrize("L", [16, 64])
def test_on_a_gpu_packed_in_bfloat16(L):
    borders = torch.tensor([0, 0, 900, 901, 2000, 3000, 3000], device="cuda")
    inputs = draw(1, 3000, 4, 2, 128, dtype=torch.bfloat16)
    check(inputs, H=4, G=2, chunk_size=L, cu_seqlens=borders)


@gpu
@pytest.mark.parametrize("L", [16, 64])
def test_on_a_gpu_with_all_gradients_at_the_papers_width(L):
    check(draw(1, 16_384, 16, 2, 128, dtype=torch.bfloat16), H=16, G=2, chunk_size=L)


@gpu
def test_on_a_gpu_a_new_length_compiles_nothing():
    compiled = []
    form = {"num_heads": 4, "num_groups": 2, "chunk_size": 16, "impl": "triton"}

    def train(B, T):
        inputs = draw(B, T, 4, 2, 64, dtype=torch.bfloat16)
        dout = torch.ones(B, T, 4, 64, device="cuda", dtype=torch.bfloat16)
        grads(lambda **x: chunk_rat_attention_projected(**x, **form).out, inputs, dout)

    train(2, 1000)
    hooks, before = triton.knobs.runtime, triton.knobs.runtime.jit_cache_hook
    hooks.jit_cache_hook = lambda **call: compiled.append(call["fn"].name)
    try:
        train(1, 1)
        train(3, 4096)
        train(1, 16_001)
        assert not compiled
        train(1, 16_400)  # 1,025 ends: the tiles for many
        assert compiled, "the hook sees a compilation"
    finally:
        hooks.jit_cache_hook = before


@gpu
@pytest.mark.parametrize(("T", "L"), [(262_144, 16), (70_001, 64)])
def test_on_a_gpu_at_the_papers_lengths_the_last_tokens_are_exact(T, L):
    """The reference cannot hold all logits; the definition's last tokens can be computed alone."""
    H, G, D = 16, 2, 128
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1, T, (3 * H + 2 * G) * D, generator=generator, device="cuda").bfloat16()
    form = {"num_heads": H, "num_groups": G, "chunk_size": L}
    tail = L + T % L
    with torch.no_grad():
        out = chunk_rat_attention_projected(x, **form, impl="triton").out
        assert out.isfinite().all()
        state = init_state(1, H, D, dtype=torch.bfloat16, device=torch.device("cuda"))
        _, state = chunk_rat_attention_projected(
            x[:, :-tail], **form, initial_state=state, impl="triton"
        )
        after = RATState(*(s.float() if s.is_floating_point() else s for s in state))
        ref = chunk_rat_attention_projected(
            x[:, -tail:].float(), **form, initial_state=after, impl="reference"
        ).out
    assert_close("tail", out[:, -tail:], ref, rtol=5e-3)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("part", "value", "dtype"),  # the part of z, v, g, q, k
    [
        (1, NAN, torch.float32),
        (1, INF, torch.bfloat16),
        (2, NAN, torch.float32),
        (3, NAN, torch.float32),
        (4, NAN, torch.float32),
    ],
)
def test_a_broken_token_changes_none_before_it_and_no_other_sequence(value, part, dtype):
    inputs = draw(1, 50, 2, 1, 32, dtype=dtype)
    heads = [2, 2, 2, 1, 1]
    form = {"num_heads": 2, "num_groups": 1, "chunk_size": 8, "impl": "triton"}
    broken = {**inputs, "zvgqk": inputs["zvgqk"].clone()}
    broken["zvgqk"][0, 21, 32 * sum(heads[:part]) + 3] = value
    borders = torch.tensor([0, 13, 13, 30, 50], device=DEVICE)
    for cu_seqlens, first, end in ((None, 21, 50), (borders, 21, 30)):
        expected, out = (
            chunk_rat_attention_projected(**x, **form, cu_seqlens=cu_seqlens).out
            for x in (inputs, broken)
        )
        ref = chunk_rat_attention_projected(
            **broken, **{**form, "impl": "reference"}, cu_seqlens=cu_seqlens
        ).out
        assert torch.equal(out[:, :first], expected[:, :first])
        assert torch.equal(out[:, end:], expected[:, end:])
        assert out[ref.isnan()].isnan().all(), "what is NaN must not become finite"
