"""DRT: learned retrieval of past chunks inside attention."""

from typing import TYPE_CHECKING

from mezzo_core.lazy import lazy_names

if TYPE_CHECKING:
    from mezzo_drt.stack import DRT as DRT
    from mezzo_drt.stack import DRTConfig as DRTConfig
    from mezzo_drt.state import DRTState as DRTState
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "stack": ("DRT", "DRTConfig"),
            "state": ("DRTState",),
        },
    )

__version__ = "0.1.0"
