"""Division of positions: right in compiled programs, at lengths that are no multiple."""

import torch
from mezzo_rat.ops.divide import floor_divide

LENGTHS = (1, 16, 64)


def test_the_inductor_divides_the_last_positions_too():
    torch._dynamo.reset()

    def chunks(x):
        return [floor_divide(torch.arange(x.shape[1])[None], length) for length in LENGTHS]

    compiled = torch.compile(chunks, fullgraph=True)
    for num_tokens in (100, 194, 17, 0):
        found = compiled(torch.zeros(1, num_tokens))
        for length, chunk in zip(LENGTHS, found, strict=True):
            expected = torch.arange(num_tokens)[None] // length
            assert torch.equal(chunk, expected), (length, num_tokens)


def test_the_op_is_registered_in_full():
    torch.library.opcheck(
        torch.ops.mezzo_rat.floor_divide.default, (torch.arange(-5, 20).view(5, 5).T, 4)
    )
