"""The ops can be imported by their names, although folders have the names of functions."""

import subprocess
import sys

import pytest

FUNCTION = """
from mezzo_rat.ops import gated_scan
assert gated_scan.__name__ == "gated_scan"
"""
MODULE = """
import mezzo_rat.ops.gated_scan.api
from mezzo_rat.ops.gated_scan import api
assert api.gated_scan.__name__ == "gated_scan"
"""


@pytest.mark.parametrize("order", [(FUNCTION, MODULE), (MODULE, FUNCTION)], ids=["op", "module"])
def test_an_op_and_its_folder_can_be_imported_in_either_order(order):
    same = "assert gated_scan is api.gated_scan is mezzo_rat.ops.gated_scan\n"
    command = [sys.executable, "-c", "".join(order) + same]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_has_every_public_name_of_its_ops():
    import mezzo_rat.ops
    from mezzo_rat.ops.gated_scan import GatedScanOutput
    from mezzo_rat.ops.rat_attention import RATState

    assert mezzo_rat.ops.GatedScanOutput is GatedScanOutput
    assert mezzo_rat.ops.RATState is RATState
