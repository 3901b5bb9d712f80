"""Division of positions: right in compiled programs, at lengths that are no multiple."""

import pytest
import torch
from mezzo_rat.ops.divide import floor_divide


@pytest.mark.parametrize("length", [1, 16, 64])
def test_the_inductor_divides_the_last_positions_too(length):
    torch._dynamo.reset()

    def chunks(x):
        return floor_divide(torch.arange(x.shape[1])[None], length)

    compiled = torch.compile(chunks, fullgraph=True)
    for num_tokens in (100, 194, 17, 0):
        expected = torch.arange(num_tokens)[None] // length
        assert torch.equal(compiled(torch.zeros(1, num_tokens)), expected), num_tokens


def test_the_op_is_registered_in_full():
    torch.library.opcheck(
        torch.ops.mezzo_rat.floor_divide.default, (torch.arange(-5, 20).view(5, 5).T, 4)
    )
