"""Inputs of the ops that are no numbers, or hold no tokens. Mixers: the laws in `test_family`."""

import math

import pytest
import torch
from mezzo_gsa.ops.chunking.chunks import place_chunks
from mezzo_gsa.ops.gla import chunk_gla, recurrent_gla
from mezzo_gsa.ops.gsa import chunk_gsa, recurrent_gsa

T = 70  # more than a chunk of 64
BAD = [math.nan, math.inf, -math.inf]


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def draw(op):
    inputs = {"q": normal(1, T, 4, 3), "k": normal(1, T, 2, 3), "v": normal(1, T, 2, 5)}
    if op in (chunk_gla, recurrent_gla):
        return {**inputs, "g": -normal(1, T, 2, 3).abs()}
    return {**inputs, "g": -normal(1, T, 2, 6).abs(), "s": normal(1, T, 2, 6)}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    ("op", "name"), [*((chunk_gla, n) for n in "qkvg"), *((chunk_gsa, n) for n in "qkvgs")]
)
def test_an_input_of_an_op_that_is_no_number_reaches_no_earlier_token_and_no_other_head(
    op, name, bad
):
    inputs = draw(op)
    out, _ = op(**inputs)
    inputs[name][0, 40, 0] = bad
    found, _ = op(**inputs)
    assert torch.equal(found[:, :40], out[:, :40])
    assert torch.equal(found[:, 40:, 2:], out[:, 40:, 2:])  # the other key head's queries
    if name == "g" and bad < 0:  # forgets all, which is legal
        assert found.isfinite().all()
    else:
        assert found[0, 40, :2].isfinite().logical_not().any()


@pytest.mark.parametrize("op", [chunk_gla, chunk_gsa])
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_no_tokens_and_no_rows_have_outputs_and_gradients_of_their_shapes(op, shape):
    inputs = {n: x[:, :1].expand(*shape, *x.shape[2:]).clone() for n, x in draw(op).items()}
    leaves = [x.requires_grad_() for x in inputs.values()]
    out, state = op(**inputs)
    assert out.shape == (*shape, 4, 5)
    states = [state] if op is chunk_gla else state
    assert all(x.shape[0] == shape[0] and not x.any() for x in states)
    found = torch.autograd.grad(out.sum(), leaves, allow_unused=False)
    assert [x.shape for x in found] == [x.shape for x in leaves]


@pytest.mark.parametrize("borders", [[0, 3, 99], [41, 8, 24], [-9, -3, 70]])
def test_no_chunk_lies_beyond_the_row_whatever_the_borders_are(borders):
    chunks = place_chunks(1, T, 32, torch.tensor(borders))
    first, length, _ = chunks.chunk_table.T
    assert (first >= 0).all()
    assert (first + length <= T).all()
    begin, count = chunks.segment_table[chunks.segment_table[:, 1] > 0].T
    assert (begin >= 0).all()
    assert (begin + count <= chunks.num_chunks).all()


@pytest.mark.parametrize("op", [chunk_gla, recurrent_gla, chunk_gsa, recurrent_gsa])
def test_autocast_changes_nothing(op):
    inputs = draw(op)
    out, _ = op(**inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(op(**inputs)[0], out)
