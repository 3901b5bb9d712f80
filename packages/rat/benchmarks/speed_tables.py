"""Measure the paper's Tables 6, 7 and 8, Figure 5 and the throughputs of Tables 1 and 11.

    python packages/rat/benchmarks/speed_tables.py --out packages/rat/results/nvidia-h200
    python packages/rat/benchmarks/speed_tables.py --out DIR --only table8 --lengths 4096 16384
    python packages/rat/benchmarks/speed_tables.py --out DIR --dry-run      # toy sizes, on a CPU

Writes speed_NAME.json (an experiment, see mezzo_core.papers.results) after each cell and
speed_NAME.png at the end. A second run measures only the cells that this commit does not have yet.
`mezzo-rat reproduce --scale gpu` does the same and compares the results with the paper.
"""

import argparse
import sys
from pathlib import Path

from mezzo_core.errors import UserError
from mezzo_rat.reproduce import read_published
from mezzo_rat.reproduction.gpu.shapes import DRY, FULL, NAMES, TABLES, Selection
from mezzo_rat.reproduction.gpu.tables import measure_tables
from rich.console import Console


def main(words: list[str] | None = None) -> int:
    """Measure what the command line selects; return 0, or 2 when the user can mend a mistake."""
    arguments = parse(words)
    console = Console()
    try:
        measure_tables(
            DRY if arguments.dry_run else FULL,
            arguments.out,
            read_published(),
            Selection(tuple(arguments.only), tuple(arguments.lengths), tuple(arguments.models)),
            say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
            commit=arguments.commit,
        )
    except UserError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    return 0


def parse(words: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--only", nargs="+", default=[], help=f"of {', '.join(TABLES)}")
    parser.add_argument("--lengths", nargs="+", type=int, default=[], help="T, or positions")
    parser.add_argument("--models", nargs="+", default=[], help=f"of {', '.join(NAMES)}")
    parser.add_argument("--commit", help="of the code, where no checkout tells it")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on a CPU")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
