"""Landmark attention, a baseline."""

from mezzo_drt.baselines.landmark.stack import LandmarkConfig, LandmarkStack, LandmarkState

__all__ = ["LandmarkConfig", "LandmarkStack", "LandmarkState"]
