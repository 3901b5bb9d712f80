"""The ops can be imported by their names, although folders have the names of functions."""

import subprocess
import sys

import pytest

FUNCTIONS = """
from mezzo_rat.ops import gated_scan
"""
FOLDERS = """
import mezzo_rat.ops.gated_scan.api
from mezzo_rat.ops.gated_scan import api as gated
"""
SAME = """
assert gated_scan is gated.gated_scan is mezzo_rat.ops.gated_scan
"""


@pytest.mark.parametrize("order", [(FUNCTIONS, FOLDERS), (FOLDERS, FUNCTIONS)], ids=["op", "api"])
def test_an_op_and_its_folder_can_be_imported_in_either_order(order):
    command = [sys.executable, "-c", "".join(order) + SAME]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
