"""Runs a script of `experiments/` in the process of a test."""

import runpy
import sys
from pathlib import Path
from unittest.mock import patch


def run_script(path: Path, *words: str) -> int:
    """Run a script on a command line, and return its exit code."""
    with patch.object(sys, "argv", [str(path), *words]):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
    raise AssertionError(f"{path} does not end with an exit code")
