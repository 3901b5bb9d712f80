"""Landmark attention, a baseline."""

from mezzo_drt.baselines.landmark.stack import LandmarkConfig, LandmarkStack
from mezzo_drt.baselines.landmark.state import LandmarkState

__all__ = ["LandmarkConfig", "LandmarkStack", "LandmarkState"]
