"""An op is timed in the phases that are asked for, with the gradients of all its inputs."""

from dataclasses import replace

import torch
from mezzo_core.bench import Contender, timed

CPU = torch.device("cpu")


def test_training_computes_the_gradient_of_every_input_and_a_forward_none():
    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return x * w

        @staticmethod
        def backward(ctx, dout):
            needed.append(ctx.needs_input_grad)
            return dout, dout

    needed = []
    inputs = {"x": torch.randn(3), "w": torch.nn.Parameter(torch.randn(3))}
    contender = Contender("an op", "ours", {"B": 3}, lambda x, w: Watched.apply(x, w), inputs)
    (row,) = timed(replace(contender, phases=("forward",)), CPU, 0.0, print)
    assert (row.name, row.impl, row.shape) == ("an op forward", "ours", {"B": 3})
    assert not needed
    assert [row.name for row in timed(contender, CPU, 0.0, print)][1] == "an op train"
    assert set(needed) == {(True, True)}


def test_what_does_not_fit_is_said_and_the_rest_is_timed():
    def run(x):
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError
        return 2 * x

    said = []
    contender = Contender("an op", "ours", {"B": 1}, run, {"x": torch.randn(3)})
    rows = list(timed(contender, CPU, 0.0, said.append))
    assert [row.name for row in rows] == ["an op forward"]
    assert said == ["an op train (ours) at {'B': 1}: out of memory"]
