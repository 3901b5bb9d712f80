"""What is trained on MQAR and how; the defaults are Zoology's protocol, in full."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
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
NAMES = {**PAPER_NAMES, "gsa_one_head": "GSA, one head"}
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
        num_layers: of the models.
        conv_width: tokens of a short convolution in the place of the first mixer, as Zoology's
            newer protocol has it (3); 0: a mixer there too.
        init: "zoology" draws all matrices from N(0, 0.02); for "fan_in" see `MixerOnlyConfig`.
        precision: as of `TrainConfig`; the protocol's is "fp32".
        compile: use torch.compile.

    Raises:
        UserError: if a list is empty or repeats itself, or a value is unknown or out of its range.
    """

    task: MQARConfig = field(default_factory=MQARConfig)
    models: tuple[str, ...] = ("attention", "gsa", "gla", "hgrn2", "retnet")
    widths: tuple[int, ...] = (64, 128, 256, 512)
    learning_rates: tuple[float, ...] = (1e-4, 4.64e-4, 2.15e-3, 1e-2)
    skip_solved: bool = False
    batch_size: int = 128
    epochs: int = 64
    num_layers: int = 2
    conv_width: int = 0
    init: Literal["zoology", "fan_in"] = "zoology"
    precision: Precision = "auto"
    compile: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("models", "widths", "learning_rates"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise UserError(f"{name} must be one or more different values, got {values}")
        for model in self.models:
            if model not in MIXERS:
                raise UserError(f"no model is named {model!r}{nearest(model, MIXERS)}")
        counts = {name: getattr(self, name) for name in ("batch_size", "epochs", "num_layers")}
        for name, value in {**counts, "widths": min(self.widths)}.items():
            if value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if not min(self.learning_rates) > 0:
            raise UserError(f"learning_rates must be positive, got {min(self.learning_rates)}")
        if self.conv_width < 0 or (self.conv_width and self.num_layers == 1):
            raise UserError(
                f"conv_width must be 0 or more, and 0 in models of one layer, got {self.conv_width}"
            )
        if self.task.train_rows < self.batch_size:
            raise UserError(
                f"train_rows must fill a batch of {self.batch_size}, got {self.task.train_rows}"
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
        mixers = [MIXERS[model](width, bound) for bound in lower_bounds(self.num_layers)]
        if self.conv_width:
            mixers[0] = ShortConvConfig(self.conv_width)
        first, *others = (MixerOnlyConfig(each, fan_in=self.init == "fan_in") for each in mixers)
        layers = (replace(first, dropout=DROPOUT), *others)
        return (PositionsConfig(self.task.seq_len), *layers) if model == "attention" else layers

    def header(self, device: torch.device) -> Header:
        """Return the head of the result, as measured on this device."""
        whole = SweepConfig()
        lists = {name: getattr(whole, name) for name in ("models", "widths", "learning_rates")}
        is_whole = replace(self, **lists, compile=False) == whole and all(
            set(values) <= set(getattr(self, name)) for name, values in lists.items()
        )
        return Header(
            kind="recall",
            title="Figure 3a: recall (MQAR)",
            setting=self._in_words(device),
            how="the paper's setting" if is_whole else "scaled down",
            columns=tuple(f"C={width}" for width in sorted(self.widths)),
            models=tuple(NAMES[model] for model in self.models),
            unit="accuracy",
            better="higher",
        )

    def _in_words(self, device: torch.device) -> str:
        task, layers = self.task, f"{self.num_layers} layers"
        if self.conv_width:
            others = self.num_layers - 1
            layers = f"a causal convolution of {self.conv_width} tokens, then {others}"
        few = f" of {', '.join(map(str, task.train_pairs))} pairs" if task.train_pairs else ""
        auto = "bf16" if device.type == "cuda" else "fp32"
        products = auto if self.precision == "auto" else self.precision
        rates = ", ".join(f"{lr:g}" for lr in self.learning_rates)
        until = ", until one solves the task" if self.skip_solved else ""
        return (
            f"MQAR, T {task.seq_len}, {task.num_pairs} pairs, vocabulary {task.vocab_size}; "
            f"{layers} of LayerNorm and mixer with one head (GSA: four, or one where it says so; "
            f"HGRN2: of width 128 at most), embedding tied, dropout {DROPOUT} on it, matrices of "
            f"mixers started by {self.init}; {task.train_rows:,} rows{few}, batch "
            f"{self.batch_size}, at most {self.epochs} epochs, AdamW with decay 0.1 of matrices, "
            f"cosine to 0; {task.test_rows:,} test rows, the best learning rate of {rates}{until}; "
            f"{products} products. Unlike Zoology's models: RMSNorm before the head, no biases in "
            "projections, no dropout inside attention, no smaller start for output projections, no "
            "second normalized residual in place of the MLP"
        )
