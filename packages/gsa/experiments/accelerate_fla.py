"""Train flash-linear-attention's 340M GSA with its own kernels, and with ours (`accelerate_fla`).

    python packages/gsa/experiments/accelerate_fla.py --out packages/gsa/results/nvidia-h200

Writes fla_training.json; `first_step_s` has the compiling and tuning of the kernels, if none are in
Triton's cache. That library needs a GPU: without one nothing is measured.
"""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from mezzo_core.reproduction import Cell, Entry, Options, run_script
from mezzo_core.reproduction.runner import Job, passes
from mezzo_core.reproduction.timing import now
from mezzo_core.reproduction.training_speed import time_training, training_step
from mezzo_gsa import accelerate_fla
from mezzo_gsa.reproduction import fla
from torch import Tensor, nn

MODELS = {"its kernels": nullcontext, "our kernels": accelerate_fla}
B, T = 16, 2048


class Timed(nn.Module):
    """A model of that library, with what the timing of training asks of an `LM`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.embed, self.vocab_size = model, model.model.embeddings, model.vocab_size

    def loss(self, tokens: Tensor, _: Tensor) -> Tensor:
        """Return the loss of each token but the first."""
        return self.model(input_ids=tokens, labels=tokens).loss


def measure(options: Options) -> None:
    """Time training with each of the kernels."""
    if fla.runs_on(options.device.type):
        options.run(
            "fla_training",
            [Job((Cell(name, str(T)),), train) for name in MODELS],
            kind="speed",
            title="GSA 340M of flash-linear-attention: training",
            setting=f"whole training steps (forward, backward, fused AdamW) of {B} rows of {T:,} "
            "random tokens, bf16 autocast over float32 weights, the model not compiled",
            unit="tokens/s",
            how="other hardware",
            better="higher",
        )


def train(cells: tuple[Cell, ...], _: Path, device: torch.device) -> Iterator[list[Entry]]:
    """Yield the speed of training in three passes."""
    from fla.models import GSAConfig, GSAForCausalLM

    with MODELS[cells[0].model]():
        config = GSAConfig(hidden_size=1024, num_hidden_layers=24)
        model = cast(Any, Timed(GSAForCausalLM(config)).to(device))
        begin = now(device)
        training_step(model, B, T)()
        first = now(device) - begin
        found = time_training(model, B, T)
    yield passes(cells[0], found, "tokens_per_second", first_step_s=first)


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, tuple(MODELS)))
