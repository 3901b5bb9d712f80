"""`mezzo-gsa bench`: ops, one layer and tiny models, beside fla and softmax attention."""

from itertools import chain
from pathlib import Path
from typing import Any

import torch
from mezzo_core.bench import run, say

from mezzo_gsa.bench.layers import decode_rows, layer_rows, model_rows
from mezzo_gsa.bench.ops import attention_rows, gla_rows, gsa_rows
from mezzo_gsa.bench.setting import CPU, GPU, QUICK, Setting


def bench(
    device: torch.device, quick: bool = False, out: Path | None = None
) -> list[dict[str, Any]]:
    """Measure ops, layers and tiny models on `device`, print each row, append it to `out`.

    fla (flash-linear-attention) is measured on a GPU where it is installed. It tunes its kernels
    for minutes.

    Args:
        device: where to measure.
        quick: use tiny shapes, which take seconds.
        out: a .jsonl file; None writes nothing.

    Raises:
        UserError: if an op or a layer is wrong.
    """
    shapes = QUICK if quick else GPU if device.type == "cuda" else CPU
    parts = (gsa_rows, gla_rows, attention_rows, layer_rows, decode_rows, model_rows)
    setting = Setting(shapes, device, say)
    return run(chain.from_iterable(part(setting) for part in parts), device, out, say)
