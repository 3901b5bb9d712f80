"""Measure attention's backends on a GPU, by which `impl="auto"` chooses.

    python packages/core/experiments/attention.py --out packages/core/results/nvidia-h200
    python packages/core/experiments/attention.py --out DIR --dry-run    # toy sizes, on a CPU

Adds rows to attention.jsonl; a backend that cannot do a request, or is not installed, is left out.
"""

import sys
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from mezzo_core import bench
from mezzo_core.bench import Contender, Options, Row, say, timed
from mezzo_core.ops.attention import attention
from mezzo_core.testing import assert_close
from torch import Tensor

BACKENDS = ("sdpa", "flex", "flash")
MASKED = ("flex", "flash")
"""Those that skip what a mask hides."""
SHAPES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "causal": ({"B": 8, "T": 2048, "HQ": 16, "H": 16, "D": 128}, {}),
    "causal, long": ({"B": 4, "T": 16_384, "HQ": 16, "H": 16, "D": 128}, {}),
    "causal, narrow": ({"B": 16, "T": 2048, "HQ": 16, "H": 16, "D": 64}, {}),
    "causal, grouped": ({"B": 4, "T": 8192, "HQ": 8, "H": 2, "D": 128}, {}),
    "window": ({"B": 4, "T": 16_384, "HQ": 12, "H": 12, "D": 64}, {"window_size": 512}),
    "wide window": ({"B": 4, "T": 16_384, "HQ": 16, "H": 16, "D": 128}, {"window_size": 1024}),
    "packed": ({"B": 1, "T": 32_768, "HQ": 16, "H": 16, "D": 64}, {"cu_seqlens": 1000}),
}
"""Each request's sizes and options; packed sequences have 1,000 tokens each."""


def measure(options: Options) -> None:
    """Time every backend that the command line names at every shape, bf16."""
    bench.run(rows(options), options.device, options.out / "attention.jsonl", say)


def rows(options: Options) -> Iterator[Row]:
    """Time the backends one after another."""
    torch.manual_seed(0)
    for name, (sizes, extra) in SHAPES.items():
        shape = {k: min(n, 64) if k == "T" else min(n, 4) for k, n in sizes.items()}
        shape = shape if options.dry_run else sizes
        bench.start_afresh()
        B, T, HQ, H, D = shape.values()
        inputs = {
            x: torch.randn(B, T, heads, D, device=options.device, dtype=torch.bfloat16)
            for x, heads in (("q", HQ), ("k", H), ("v", H))
        }
        extra = {**extra}
        if "cu_seqlens" in extra:
            lengths = [1000] * (T // 1000) + [T % 1000]
            borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            extra["cu_seqlens"] = borders.to(options.device)
        found: list[Tensor] = []
        skips = "window_size" in extra or "cu_seqlens" in extra
        for impl in (x for x in options.models if x in MASKED or not skips):
            run = partial(attend, impl=impl, **extra)
            try:
                with torch.no_grad():
                    found.append(run(**inputs))
            except ValueError as error:
                say(f"{name}: {error}")
                continue
            assert_close(f"{impl}'s output", found[-1], found[0], rtol=1e-2)
            contender = Contender(f"{name} attention op", impl, shape, run, inputs)
            yield from timed(contender, options.device, 0.02 if options.dry_run else 0.3, say)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return attention's output alone."""
    return attention(q, k, v, **options).out


if __name__ == "__main__":
    sys.exit(bench.run_script(measure, __doc__, BACKENDS))
