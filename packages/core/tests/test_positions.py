import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.positions import (
    RADIANS,
    RopeScaling,
    alibi_slopes,
    apply_rope,
    rope_angles,
    rope_steps,
    sequence_ids,
    sequence_positions,
)

some = settings(max_examples=settings().max_examples // 4)


def rotated(x, positions, base=10_000.0):
    return apply_rope(x, *rope_angles(positions, x.shape[-1], base))


def test_rope_turns_each_pair_by_its_own_frequency():
    positions, dim, base = torch.tensor([0, 1, 7, 100]), 6, 50.0
    x = torch.randn(1, 4, 2, dim, dtype=torch.float64)
    y = rotated(x, positions, base)
    for t, position in enumerate(positions.tolist()):
        for i in range(dim // 2):
            # A turn of the plane is a product of complex numbers.
            angle = torch.tensor(position * base ** (-2 * i / dim), dtype=torch.float64)
            before = torch.complex(x[0, t, :, i], x[0, t, :, i + dim // 2])
            after = before * torch.complex(angle.cos(), angle.sin())
            torch.testing.assert_close(y[0, t, :, i], after.real, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(y[0, t, :, i + dim // 2], after.imag, rtol=1e-5, atol=1e-5)


@some
@given(st.integers(0, 2**32), st.integers(0, 5000), st.sampled_from([2, 16, 64]))
def test_rope_scores_depend_on_the_distance_alone(shift, distance, dim):
    q, k = torch.randn(2, 1, 1, 1, dim, dtype=torch.float64).unbind(0)
    here = (rotated(q, torch.tensor([distance])) * rotated(k, torch.tensor([0]))).sum()
    moved = (rotated(q, torch.tensor([shift + distance])) * rotated(k, torch.tensor([shift]))).sum()
    torch.testing.assert_close(here, moved, rtol=0, atol=1e-5 * dim**0.5)


def test_rope_takes_positions_of_each_row_and_keeps_the_dtype():
    x = torch.randn(2, 3, 4, 8)
    positions = torch.tensor([[0, 1, 2], [9, 5, 5]])
    y = rotated(x, positions)
    for row in range(2):
        torch.testing.assert_close(y[row : row + 1], rotated(x[row : row + 1], positions[row]))
    assert torch.equal(rotated(x, torch.zeros(3, dtype=torch.int64)), x)
    low = rotated(x.bfloat16(), positions)
    # Float32 inside: only the result is rounded.
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, rotated(x.bfloat16().float(), positions).bfloat16())


def test_angles_are_as_exact_as_their_dtype():
    # Float32 has no number for the last.
    positions, dim, base = torch.tensor([0, 1, 999, 70_001, 2**24 + 1]), 8, 10_000.0
    exact = [[p * base ** (-2 * i / dim) for i in range(4)] for p in positions.tolist()]
    exact = torch.tensor(exact, dtype=torch.float64)
    cos, sin = rope_angles(positions, dim, base, dtype=torch.float64)
    torch.testing.assert_close(cos[:-1], exact[:-1].cos(), rtol=0, atol=1e-10)
    torch.testing.assert_close(sin[:-1], exact[:-1].sin(), rtol=0, atol=1e-10)
    narrow = rope_angles(positions, dim, base)
    assert narrow[0].dtype == torch.float32
    for found, right in zip(narrow, (exact.cos(), exact.sin()), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=0, atol=5e-7)
    angles = (positions[:, None] * rope_steps(dim, base)).float() * RADIANS  # as kernels have them
    assert torch.equal(narrow[0], angles.cos())


def test_scaling_slows_the_pairs_that_turn_seldom_in_the_original_context():
    # Pair i has a wave of 2 pi 10^i tokens, so it turns 159, 15.9, 1.59 and 0.159 times in 1000.
    scaling, before = RopeScaling(8.0, 1.0, 4.0, 1000), rope_steps(8).double()
    kept = (1000 / (20 * math.pi * 10) - 1) / (4 - 1)
    slower = torch.tensor([1, 1, kept + (1 - kept) / 8, 1 / 8], dtype=torch.float64)
    torch.testing.assert_close(rope_steps(8, 1e4, scaling).double(), before * slower)
    linear = rope_angles(torch.tensor([40]), 8, 1e4, RopeScaling(4.0))
    assert torch.equal(torch.stack(linear), torch.stack(rope_angles(torch.tensor([10]), 8)))


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ((0.5,), ValueError, "factor must be 1 or more, got 0.5"),
        ((2.0, 4.0, 4.0), ValueError, "high_freq_factor must be above low_freq_factor = 4.0"),
        ((2.0, 1.0, 4.0, -1), ValueError, "original_context must be 0 or more, got -1"),
        (("2",), TypeError, "factor must be a number, got str"),
        ((math.nan,), ValueError, "factor must be finite, got nan"),
    ],
)
def test_a_scaling_that_is_none_is_refused(numbers, error, message):
    with pytest.raises(error, match=message):
        RopeScaling(*numbers)


def test_angles_of_far_positions_stay_apart():
    cos, sin = rope_angles(torch.tensor([70_000, 70_001]), 8)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == (2, 4)
    one = rope_angles(torch.tensor([1]), 8)
    # cos(a - b) from the two must be the cosine of one step.
    step = cos[1] * cos[0] + sin[1] * sin[0]
    torch.testing.assert_close(step, one[0][0], rtol=0, atol=1e-6)


# Golden numbers from the two published implementations.
GOLDEN = {
    ("press", 8): [2.0**-h for h in range(1, 9)],
    ("olmo", 8): [2.0**-h for h in range(1, 9)],
    ("press", 12): [0.5, 0.25, 0.125, 0.0625],
    ("olmo", 12): [0.6300, 0.3969, 0.25],
    ("press", 22): [0.7071, 0.5, 0.3536, 0.25],
    ("olmo", 22): [0.7772, 0.6040, 0.4695, 0.3649],
}
LAST = {("press", 22): 0.1487, ("olmo", 22): 0.0039, ("press", 8): 2.0**-8, ("olmo", 12): 2.0**-8}


@pytest.mark.parametrize(("formula", "num_heads"), GOLDEN)
def test_slopes_are_the_published_ones(formula, num_heads):
    slopes = alibi_slopes(num_heads, formula)
    assert slopes.shape == (num_heads,)
    assert slopes.dtype == torch.float32
    golden = torch.tensor(GOLDEN[formula, num_heads])
    torch.testing.assert_close(slopes[: len(golden)], golden, rtol=0, atol=6e-5)
    if (formula, num_heads) in LAST:
        assert slopes[-1].item() == pytest.approx(LAST[formula, num_heads], abs=6e-5)
    wide = alibi_slopes(num_heads, formula, dtype=torch.float64)
    heads = torch.arange(1, num_heads + 1, dtype=torch.float64)
    if formula == "olmo":
        torch.testing.assert_close(wide, 2 ** (-8 * heads / num_heads), rtol=1e-15, atol=0)
    torch.testing.assert_close(wide.float(), slopes, rtol=3e-7, atol=0)


@pytest.mark.parametrize("num_heads", [1, 2, 4, 16, 64])
def test_the_two_formulas_agree_for_powers_of_two(num_heads):
    assert torch.equal(alibi_slopes(num_heads, "press"), alibi_slopes(num_heads, "olmo"))


packed = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@some
@given(packed, st.integers(0, 3), st.sampled_from([torch.int32, torch.int64]))
def test_packed_positions_count_from_each_border(lengths, padding, dtype):
    total = sum(lengths)
    borders = torch.tensor([0, *lengths], dtype=dtype).cumsum(0).to(dtype)
    cu_seqlens = torch.cat([borders, borders[-1:].expand(padding)])
    expected = [place for length in lengths for place in range(length)]
    owners = [i for i, length in enumerate(lengths) for _ in range(length)]
    positions = sequence_positions(total, cu_seqlens)
    assert positions.dtype == torch.int64
    assert positions.tolist() == [expected]
    assert sequence_ids(total, cu_seqlens).tolist() == owners


def test_positions_continue_from_each_rows_start():
    assert sequence_positions(3).tolist() == [[0, 1, 2]]
    start = torch.tensor([0, 5])
    assert sequence_positions(3, start=start).tolist() == [[0, 1, 2], [5, 6, 7]]


def test_positions_compile_into_one_graph():
    compiled = torch.compile(sequence_positions, fullgraph=True, backend="eager")
    cu_seqlens = torch.tensor([0, 2, 2, 5])
    assert compiled(5, cu_seqlens).tolist() == [[0, 1, 0, 1, 2]]


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="dim must be even"):
        rope_angles(torch.arange(3), 5)
    with pytest.raises(ValueError, match="base must be positive"):
        rope_angles(torch.arange(3), 4, base=0.0)
    with pytest.raises(TypeError, match="scaling must be a RopeScaling, got float"):
        rope_angles(torch.arange(3), 4, 1e4, 8.0)
    with pytest.raises(ValueError, match=r"dtype must be torch\.float32 or torch\.float64"):
        rope_angles(torch.arange(3), 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="cos and sin must be"):
        apply_rope(torch.randn(1, 2, 1, 8), *rope_angles(torch.arange(2), 4))
    with pytest.raises(ValueError, match="exclude each other"):
        sequence_positions(2, torch.tensor([0, 2]), start=torch.tensor([1]))


def test_rope_angles_pass_opcheck():
    positions = torch.arange(6).view(3, 2).T
    for more in ((), (torch.float64,), (torch.float32, [8.0, 1.0, 4.0, 100.0])):
        torch.library.opcheck(torch.ops.mezzo.rope_angles.default, (positions, 8, 10_000.0, *more))
