"""Run parts of `mezzo-gsa bench`, and write the commit that was measured.

    python packages/gsa/benchmarks/ops_and_layers.py --out DIR/bench.jsonl --commit 0123abc
    python packages/gsa/benchmarks/ops_and_layers.py --only op layer
    python packages/gsa/benchmarks/ops_and_layers.py --smoke               # seconds, on a CPU

Rows are appended, so remove the file first to measure everything again. fla
(flash-linear-attention) is also measured if it is installed, unless --only leaves it out. It tunes
its kernels for minutes.
"""

import argparse
import sys
from pathlib import Path

import torch
from mezzo_core.errors import UserError
from mezzo_gsa.bench import PARTS, bench
from rich.console import Console


def main(words: list[str] | None = None) -> int:
    """Measure what the command line selects; return 0, or 2 when the user can mend a mistake."""
    arguments = parse(words)
    is_gpu = torch.cuda.is_available() and not arguments.smoke
    try:
        bench(
            torch.device("cuda" if is_gpu else "cpu"),
            arguments.smoke,
            arguments.out,
            parts=arguments.only,
            commit=arguments.commit,
        )
    except UserError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    return 0


def parse(words: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="append rows to this .jsonl file")
    parser.add_argument("--only", nargs="+", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--commit", help="of the code, where no checkout tells it")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on a CPU")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
