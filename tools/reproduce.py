"""Reproduce every paper at the scale of this machine: `hatch run reproduce`.

    python tools/reproduce.py [--scale SCALE] [--out FOLDER]

The report, its figures and the trained models go to `reports/`; a second run replaces them.
"""

import argparse
import sys
from pathlib import Path

from mezzo_core.errors import UserError
from mezzo_rat.reproduce import SCALES, reproduce
from rich.console import Console


def main() -> int:
    """Run all papers; return 0, or 2 when the user can mend what went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", choices=SCALES, default=SCALES[0])
    parser.add_argument("--out", type=Path, default=Path("reports"))
    arguments = parser.parse_args()
    try:
        reproduce(None, arguments.scale, arguments.out)
    except UserError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, style="red", soft_wrap=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
