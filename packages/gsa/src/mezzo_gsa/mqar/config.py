"""What is trained on MQAR and how; the defaults are Zoology's protocol, in full."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from mezzo_core.bench import Header
from mezzo_core.config_json import check_fields
from mezzo_core.errors import UserError, nearest
from mezzo_core.nn import AttentionConfig, BlockConfig, BlocksConfig, LMConfig, MixerConfig
from mezzo_core.train.config import OptimConfig, Precision, TrainConfig

from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.hgrn2 import HGRN2Config, lower_bounds
from mezzo_gsa.mqar.blocks import MixerOnlyConfig, PositionsConfig, ShortConvConfig
from mezzo_gsa.mqar.task import MQARConfig
from mezzo_gsa.recipes import PAPER_NAMES
from mezzo_gsa.retnet import RetNetConfig

SOLVED = 0.99
"""A run ends when its accuracy is above this."""
DROPOUT = 0.1
"""Of the embeddings."""
MIXERS: dict[str, Callable[[int, float], MixerConfig]] = {
    "attention": lambda width, bound: AttentionConfig(head_dim=width, rope_base=None),
    "gsa": lambda width, bound: GSAConfig(num_heads=4),  # as in the paper's 1.3B model
    "gsa_one_head": lambda width, bound: GSAConfig(num_heads=1),
    "gla": lambda width, bound: GLAConfig(num_heads=1),
    # Wider models have several heads: its state is head_dim * C whatever their number.
    "hgrn2": lambda width, bound: HGRN2Config(head_dim=min(width, 128), lower_bound=bound),
    "retnet": lambda width, bound: RetNetConfig(num_heads=1),
}
"""The mixer of each name, from the model's width and the layer's lower bound of HGRN2's gates."""
PROTOCOL = (
    "MQAR by Zoology's protocol: T 512, 64 pairs, vocabulary 8,192; two layers of LayerNorm and "
    "mixer with one head (GSA: four, or one where it says so; HGRN2: of width 128 at most), "
    f"embedding tied, dropout {DROPOUT} on it; 100,000 rows, 3,000 test rows, batch 128, at most "
    "64 epochs, AdamW with decay 0.1 of matrices, cosine to 0, the best of four learning rates, "
    "fp32. Unlike Zoology's models: RMSNorm before the head, no biases in projections, no dropout "
    "inside attention, no smaller start for output projections, no second normalized residual in "
    "place of the MLP"
)
"""What the defaults are, for a result's setting."""
NAMES = {name: PAPER_NAMES.get(name, "GSA, one head") for name in MIXERS}
"""The names in the result."""


@dataclass(frozen=True)
class SweepConfig:
    """What is swept over, and what all runs share.

    Attributes:
        task: the rows; its seed is that of the weights and of dropout too.
        models: names of mixers; by default all but `gsa_one_head`.
        widths: model widths C.
        learning_rates: tried for each model and width. A run's falls from its value along half a
            cosine to 0.
        skip_solved: leave out a model's remaining learning rates at a width where one has solved
            the task already: the best accuracy could hardly change.
        batch_size: rows a step.
        epochs: at most; accuracy is measured after each.
        conv_width: tokens of a short convolution in the place of the first mixer, as Zoology's
            newer protocol has it (3); 0: a mixer there too.
        init: "zoology" draws all matrices from N(0, 0.02); for "fan_in" see `MixerOnlyConfig`.
        precision: as of `TrainConfig`.
        compile: use torch.compile.

    Raises:
        UserError: if a model is unknown, or the rows do not fill a batch.
    """

    task: MQARConfig = field(default_factory=MQARConfig)
    models: tuple[str, ...] = ("attention", "gsa", "gla", "hgrn2", "retnet")
    widths: tuple[int, ...] = (64, 128, 256, 512)
    learning_rates: tuple[float, ...] = (1e-4, 4.64e-4, 2.15e-3, 1e-2)
    skip_solved: bool = False
    batch_size: int = 128
    epochs: int = 64
    conv_width: int = 0
    init: Literal["zoology", "fan_in"] = "zoology"
    precision: Precision = "fp32"
    compile: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for model in self.models:
            if model not in MIXERS:
                raise UserError(f"no model is named {model!r}{nearest(model, MIXERS)}")
        if not 1 <= self.batch_size <= self.task.train_rows:
            raise UserError(
                f"batch_size must be from 1 to train_rows = {self.task.train_rows}, "
                f"got {self.batch_size}"
            )

    @property
    def name(self) -> str:
        """Of the result: "mqar", with "_conv" or "_fan_in" for what is not the protocol's."""
        conv = "_conv" if self.conv_width else ""
        return f"mqar{conv}{'' if self.init == 'zoology' else f'_{self.init}'}"

    def run(self, model: str, width: int, lr: float) -> TrainConfig:
        """Return one training: the mixer's name in `MIXERS`, the width C, the learning rate."""
        epoch = self.task.train_rows // self.batch_size
        stack = BlocksConfig(self._blocks(model, width))
        return TrainConfig(
            name=f"mqar {model} C={width} lr {lr:g}",
            model=LMConfig(self.task.vocab_size, width, stack=stack),
            data=self.task,
            optim=OptimConfig(lr, 0.0, warmup_fraction=0.0, betas=(0.9, 0.999), clip=math.inf),
            seq_len=self.task.seq_len,
            batch_size=self.batch_size,
            steps=self.epochs * epoch,
            seed=self.task.seed,
            eval_every=epoch,
            stop_at_accuracy=SOLVED,
            checkpoint_every=epoch,
            keep_checkpoints=1,
            precision=self.precision,
            compile=self.compile,
        )

    def _blocks(self, model: str, width: int) -> tuple[BlockConfig, ...]:
        mixers = [MIXERS[model](width, bound) for bound in lower_bounds(2)]
        if self.conv_width:
            mixers[0] = ShortConvConfig(self.conv_width)
        first, *others = (MixerOnlyConfig(each, fan_in=self.init == "fan_in") for each in mixers)
        layers = (replace(first, dropout=DROPOUT), *others)
        return (PositionsConfig(self.task.seq_len), *layers) if model == "attention" else layers

    def header(self) -> Header:
        """Return the head of the result: the protocol, and what is not as there."""
        whole = SweepConfig()
        changes = [
            f"{each.name} {getattr(ours, each.name)}, not {getattr(protocols, each.name)}"
            for ours, protocols in ((self.task, whole.task), (self, whole))
            for each in fields(protocols)
            if getattr(ours, each.name) != getattr(protocols, each.name)
            and each.name not in ("task", "models", "compile")
        ]
        is_whole = not changes and set(whole.models) <= set(self.models)
        return Header(
            kind="recall",
            title="Figure 3a: recall (MQAR)",
            setting=PROTOCOL + (f". Here: {'; '.join(changes)}" if changes else ""),
            how="the paper's setting" if is_whole else "scaled down",
            columns=tuple(f"C={width}" for width in sorted(self.widths)),
            models=tuple(NAMES[model] for model in self.models),
            unit="accuracy",
            better="higher",
        )
