"""An op is timed in the phases that are asked for."""

import torch
from mezzo_core.reproduction import Header, Result, origin
from mezzo_core.reproduction.op_speed import Contender, op_job, shape
from mezzo_core.reproduction.runner import run

CPU = torch.device("cpu")


def test_training_computes_the_gradient_of_every_input_and_a_forward_none(tmp_path):
    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return x * w

        @staticmethod
        def backward(ctx, dout):
            needed.append(ctx.needs_input_grad)
            return dout, dout

    def make(device):
        inputs = {"x": torch.randn(3), "w": torch.nn.Parameter(torch.randn(3))}
        return Contender(lambda x, w: Watched.apply(x, w), inputs)

    needed, rows = [], ("an op forward (ours)", "an op train (ours)")
    header = Header("timings", "T", "toy", ("B3",), rows, "ms")
    result = Result(tmp_path / "a.json", header, origin(CPU))
    run(result, [op_job("an op", "ours", shape(B=3), make, 0.0, ("forward",))], tmp_path, CPU)
    assert not needed
    run(result, [op_job("an op", "ours", shape(B=3), make, 0.0)], tmp_path, CPU)
    assert set(needed) == {(True, True)}
    assert tuple(entry.model for entry in result.entries) == rows
    assert {"ms_p20", "ms_p80"} <= set(result.entries[0].details)
