"""The linear recurrence h[t] = a[t] h[t-1] + x[t], elementwise, whole or restarted every chunk."""

from mezzo_rat.ops.linear_scan.api import ScanOutput as ScanOutput
from mezzo_rat.ops.linear_scan.api import linear_scan as linear_scan
