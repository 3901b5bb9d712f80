"""The models that DRT is compared with; the plain one, BaseLM, is a recipe."""

from mezzo_drt.baselines.block_recurrent import (
    BlockRecurrent,
    BlockRecurrentConfig,
    BlockRecurrentState,
)
from mezzo_drt.baselines.landmark import LandmarkConfig, LandmarkStack, LandmarkState
from mezzo_drt.baselines.models import block_recurrent_lm, landmark_lm

__all__ = [
    "BlockRecurrent",
    "BlockRecurrentConfig",
    "BlockRecurrentState",
    "LandmarkConfig",
    "LandmarkStack",
    "LandmarkState",
    "block_recurrent_lm",
    "landmark_lm",
]
