"""The measurements of a reproduction; each runs once, when a table or claim first needs it."""

from pathlib import Path

from mezzo_core.papers import Measurement
from mezzo_core.reproduction.evidence import Once, Trainings, Watch

from mezzo_rat.recipes import RECIPES
from mezzo_rat.reproduction.scale import RECIPES_OF_MODELS, Scale
from mezzo_rat.reproduction.timing import time_generation, time_layers


class Evidence:
    """The trainings and timings of one reproduction at one scale."""

    def __init__(self, scale: Scale, folder: Path, watch: Watch) -> None:
        self.scale = scale
        self._once = Once(watch)
        models = {model: RECIPES[name]() for model, name in RECIPES_OF_MODELS.items()}
        self.trainings = Trainings(models, scale.budget, folder / "runs", self._once)

    @property
    def layers(self) -> dict[str, Measurement]:
        """Times of single layers, by phase."""
        return self._once.get("timing single layers", lambda _: time_layers(self.scale))

    @property
    def generation(self) -> Measurement:
        """Tokens a second that whole models generate."""
        return self._once.get("timing generation", lambda _: time_generation(self.scale))

    @property
    def timed(self) -> bool:
        """Whether the layers were timed, without an error."""
        return self._once.went_well("timing single layers")
