"""The elementwise recurrence h[t] = a[t] h[t-1] + x[t], which may restart at every chunk."""

from mezzo_rat.ops.linear_scan.api import ScanOutput as ScanOutput
from mezzo_rat.ops.linear_scan.api import linear_scan as linear_scan
