"""The models that DRT is compared with; the plain one, BaseLM, is core's attention."""

from mezzo_drt.baselines.landmark import LandmarkConfig, LandmarkStack

__all__ = ["LandmarkConfig", "LandmarkStack"]
