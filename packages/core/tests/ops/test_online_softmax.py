import math

import pytest
import torch
from mezzo_core.ops.online_softmax import merge, softmax_with_lse

CUTS = {"one part": (9,), "two": (4, 5), "with empty ones": (0, 1, 0, 6, 2, 0)}
ROW = torch.ones(2)
cuts = pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())


def hidden():
    """Which of 9 keys 4 queries do not see: one sees all, one a single key, one none."""
    return torch.arange(9) < torch.tensor([0, 4, 8, 9])[:, None]


def attend(scores, values, cut):
    """Attend to 9 keys, to each part of them apart, and merge."""
    scores = scores.masked_fill(hidden(), -math.inf)
    parts = [
        (weights @ v, lse)
        for part, v in zip(scores.split(cut, -1), values.split(cut), strict=True)
        for weights, lse in (softmax_with_lse(part),)
    ]
    return merge(*zip(*parts, strict=True))


@cuts
def test_parts_merge_into_the_softmax_over_all_keys_with_exact_gradients(cut):
    scores, values = torch.randn(4, 9).double() * 5, torch.randn(9, 3).double()
    out, lse = attend(scores, values, cut)
    masked = scores.masked_fill(hidden(), -math.inf)
    torch.testing.assert_close(out[:3], masked[:3].softmax(-1) @ values, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(lse, masked.logsumexp(-1), rtol=1e-14, atol=1e-14)
    assert torch.equal(out[3], torch.zeros(3).double())
    inputs = [x.requires_grad_() for x in (scores, values)]
    assert torch.autograd.gradcheck(
        lambda s, v: [x[:last] for x, last in zip(attend(s, v, cut), (4, 3), strict=True)], inputs
    )


@pytest.mark.any_shapes
def test_it_compiles_in_one_graph():
    outs, lses = torch.randn(2, 3, 2).unbind(), torch.randn(2, 3).unbind()
    compiled = torch.compile(merge, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(outs, lses), merge(outs, lses))


def test_a_nan_stays_in_its_row_and_what_an_empty_part_holds_does_not_count():
    outs = [torch.randn(3, 2).requires_grad_() for _ in range(2)]
    lses = [torch.randn(3).requires_grad_() for _ in range(2)]
    clean = merge(outs, lses)
    with torch.no_grad():
        outs[0][0], lses[0][1], outs[1][2], lses[1][2] = math.nan, math.nan, math.nan, -math.inf
    out, lse = merge(outs, lses)
    assert out[:2].isnan().all()
    assert lse.isnan().tolist() == [False, True, False]
    assert torch.equal(lse[0], clean[1][0])
    assert torch.equal(out[2], outs[0][2])
    assert torch.equal(lse[2], lses[0][2])
    (out[2].sum() + lse[2]).backward()
    assert all(x.grad[2].isfinite().all() for x in (*outs, *lses))
    assert not outs[1].grad[2].any()


def test_the_result_has_the_dtype_of_the_first_part_and_the_lse_is_float32():
    out, lse = merge([torch.ones(2, 3).bfloat16(), torch.ones(2, 3)], [torch.zeros(2).half()] * 2)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, torch.ones(2, 3).bfloat16())


@pytest.mark.parametrize(
    ("error", "message", "outs", "lses"),
    [
        (ValueError, "got 0 outs and 0 lses", [], []),
        (ValueError, "got 2 outs and 1 lses", [torch.ones(2, 3)] * 2, [ROW]),
        (ValueError, r"lses\[0\] must be \(2,\), got \(3,\)", [torch.ones(2, 3)], [torch.ones(3)]),
        (
            ValueError,
            r"outs\[1\] must be \(2, 3\), got \(2,\)",
            [torch.ones(2, 3), ROW],
            [ROW, ROW],
        ),
        (TypeError, r"lses\[0\] must be floating-point", [torch.ones(2, 3)], [torch.ones(2).int()]),
        (ValueError, r"lses\[0\] is on meta", [torch.ones(2, 3)], [torch.ones(2, device="meta")]),
    ],
)
@pytest.mark.any_shapes
def test_bad_arguments_are_named(error, message, outs, lses):
    with pytest.raises(error, match=message):
        merge(outs, lses)
