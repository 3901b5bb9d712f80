"""The models that DRT is compared with; the plain one, BaseLM, is core's attention."""

from mezzo_drt.baselines.block_recurrent import (
    BlockRecurrent,
    BlockRecurrentConfig,
    BlockRecurrentState,
)
from mezzo_drt.baselines.landmark import LandmarkConfig, LandmarkStack, LandmarkState

__all__ = [
    "BlockRecurrent",
    "BlockRecurrentConfig",
    "BlockRecurrentState",
    "LandmarkConfig",
    "LandmarkStack",
    "LandmarkState",
]
