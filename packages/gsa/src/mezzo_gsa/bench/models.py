"""Benchmarks of whole models: a training step (forward, backward) of the tiny recipes.

The paper's models of 1.3B weights are measured by `benchmarks/model_speed.py`.
"""

from collections.abc import Iterator
from functools import partial

import torch
from mezzo_core.bench import Row, measure
from mezzo_core.nn.lm import LM
from torch import Tensor

from mezzo_gsa.bench.benchmark import Benchmark
from mezzo_gsa.recipes import PAPER_NAMES, recipe


def model_rows(benchmark: Benchmark) -> Iterator[Row]:
    """Time each architecture of the paper's tables at the tiny recipes' size, eagerly."""
    for architecture in PAPER_NAMES:
        config = recipe("tiny", architecture).model
        torch.manual_seed(0)
        with benchmark.device:
            model = config.build()
        B, T = benchmark.shapes.batches[0]
        tokens = torch.randint(config.vocab_size, (B, T), device=benchmark.device)
        step = partial(_step, model, tokens)
        shape = {"B": B, "T": T, "C": config.d_model}
        timing = measure(step, benchmark.device, seconds=benchmark.shapes.seconds)
        yield Row(f"tiny_{architecture} model train", benchmark.impl, shape, timing)


def _step(model: LM, tokens: Tensor) -> None:
    model.zero_grad()
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        loss = model.loss(tokens, tokens)
    loss.backward()
