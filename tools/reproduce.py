"""Reproduce every paper at the scale of this machine: `hatch run reproduce`.

    python tools/reproduce.py [--scale SCALE] [--out FOLDER]

The report, its figures and the trained models go to `reports/`; a second run replaces them. A paper
without a scale of the given name takes its usual one.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from mezzo_core.console import complain
from mezzo_core.errors import UserError
from mezzo_core.reproduction.reproduce import Reproduction, reproduce_papers


def papers() -> list[Reproduction]:
    """Return the papers of all packages that have a `published.toml`."""
    found = sorted(Path(__file__).parents[1].glob("packages/*/src/*/reproduction/published.toml"))
    return [import_module(f"{path.parts[-3]}.reproduction.claims").REPRODUCTION for path in found]


def main() -> int:
    """Run all papers; return 0, or 2 when the user can mend what went wrong."""
    every = papers()
    scales = tuple(dict.fromkeys(scale for paper in every for scale in paper.scales))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", choices=scales, default=scales[0])
    parser.add_argument("--out", type=Path, default=Path("reports"))
    arguments = parser.parse_args()
    try:
        reproduce_papers(every, None, arguments.scale, arguments.out)
    except UserError as error:
        complain(f"error: {error}", style="red")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
