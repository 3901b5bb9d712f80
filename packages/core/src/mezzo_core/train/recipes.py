"""A package's recipes: named functions, each of which returns a whole training run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mezzo_core.data import DataConfig
from mezzo_core.errors import UserError, nearest
from mezzo_core.nn.lm import LMConfig
from mezzo_core.train.config import OptimConfig, TrainConfig

Recipes = Mapping[str, Callable[[], TrainConfig]]


@dataclass(frozen=True, kw_only=True)
class AbstractHyperparameters:
    """What all architectures of one comparison share; a paper adds what its models need.

    Attributes:
        vocab_size, d_model: of the model.
        all others: of the training, see `TrainConfig`.
    """

    vocab_size: int
    d_model: int
    data: DataConfig
    optim: OptimConfig
    seq_len: int
    batch_size: int
    steps: int
    micro_batch_size: int | None = None
    eval_every: int = 100
    eval_batches: int | None = None
    checkpoint_every: int = 100
    compile: bool = False

    def run(self, name: str, model: LMConfig) -> TrainConfig:
        """Return the run of one model with these hyperparameters."""
        return TrainConfig(
            name=name,
            model=model,
            data=self.data,
            optim=self.optim,
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            steps=self.steps,
            eval_every=self.eval_every,
            eval_batches=self.eval_batches,
            checkpoint_every=self.checkpoint_every,
            compile=self.compile,
        )


def find_recipe(recipes: Recipes, name: str) -> TrainConfig:
    """Return the recipe of this name.

    Raises:
        UserError: if there is no such recipe; the message shows similar names.
    """
    if name not in recipes:
        raise UserError(f"no recipe is named {name!r}{nearest(name, recipes)}")
    return recipes[name]()
