"""The gated linear RNN between its two projections: forget gate, recurrence, output gate."""

from mezzo_rat.ops.gated_scan.api import GatedScanOutput as GatedScanOutput
from mezzo_rat.ops.gated_scan.api import gated_scan as gated_scan
