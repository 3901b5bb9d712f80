"""First-order linear recurrences along time, h[t] = a[t] h[t-1] + x[t]."""

from mezzo_core.ops.scan.api import ScanOutput as ScanOutput
from mezzo_core.ops.scan.api import linear_scan as linear_scan
