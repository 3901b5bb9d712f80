"""The part of the gated linear RNN between its projections: both gates and the recurrence."""

from mezzo_rat.ops.gated_scan.api import GatedScanOutput as GatedScanOutput
from mezzo_rat.ops.gated_scan.api import gated_scan as gated_scan
