"""The ops can be imported by their names, although folders have the names of functions."""

import subprocess
import sys

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
RUN = """
import os, sys, torch
for code in sys.argv[1:]:
    if os.fork() == 0:
        exec(code)
        os._exit(0)
    assert os.wait()[1] == 0
"""
"""Torch is imported once; after a fork, each order is alone."""


def test_an_op_and_its_folder_can_be_imported_in_either_order():
    orders = FUNCTIONS + FOLDERS + SAME, FOLDERS + FUNCTIONS + SAME
    command = [sys.executable, "-c", RUN, *orders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
