"""DRT: learned retrieval of past chunks inside attention."""

from mezzo_drt.stack import DRT as DRT
from mezzo_drt.stack import DRTConfig as DRTConfig
from mezzo_drt.state import DRTState as DRTState

__version__ = "0.1.0"
