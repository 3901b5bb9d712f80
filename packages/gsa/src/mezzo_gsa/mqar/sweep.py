"""A sweep over models, widths and learning rates on MQAR; the defaults are Zoology's protocol."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from mezzo_core.bench import Header, Result, origin
from mezzo_core.bench.sweep import best_run
from mezzo_core.config_json import check_fields
from mezzo_core.device import choose_device
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
DROPOUT = 0.1  # of the embeddings
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
        learning_rates: tried for each model and width; each falls along half a cosine to 0.
        skip_solved: try no further learning rates for a model at a width where one has solved the
            task: the best accuracy could hardly change.
        batch_size: rows a step.
        epochs: at most; accuracy is measured after each.
        conv_width: tokens of a short convolution in the place of the first mixer, as Zoology's
            newer protocol has it (3); 0: a mixer there too.
        init: "zoology" draws all matrices from N(0, 0.02); for "fan_in" see `MixerOnlyConfig`.
        precision, compile: as of `TrainConfig`.

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
        if not 1 <= self.batch_size <= (rows := self.task.train_rows):
            raise UserError(
                f"batch_size must be from 1 to train_rows = {rows}, got {self.batch_size}"
            )

    @property
    def name(self) -> str:
        """Of the result: "mqar", with "_conv" or "_fan_in" for what is not the protocol's."""
        conv = "_conv" if self.conv_width else ""
        return f"mqar{conv}{'' if self.init == 'zoology' else f'_{self.init}'}"

    def run(self, model: str, width: int, lr: float) -> TrainConfig:
        """Return one training: the mixer's name in `MIXERS`, the width C, the learning rate."""
        epoch = self.task.train_rows // self.batch_size
        mixers = [MIXERS[model](width, bound) for bound in lower_bounds(2)]
        if self.conv_width:
            mixers[0] = ShortConvConfig(self.conv_width)
        first, second = (MixerOnlyConfig(each, fan_in=self.init == "fan_in") for each in mixers)
        blocks: tuple[BlockConfig, ...] = (replace(first, dropout=DROPOUT), second)
        if model == "attention":
            blocks = (PositionsConfig(self.task.seq_len), *blocks)
        return TrainConfig(
            name=f"mqar {model} C={width} lr {lr:g}",
            model=LMConfig(self.task.vocab_size, width, stack=BlocksConfig(blocks)),
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


def sweep(
    config: SweepConfig,
    out: Path,
    say: Callable[[str], None],
    *,
    runs: Path | None = None,
    device: str | torch.device | None = None,
) -> Result:
    """Train everything that `config` asks for, narrow models first, and return the result.

    It gets an entry for each model and width: the best accuracy, with that run's details, and those
    of the `others`. A sweep that was killed goes on: runs resume from their own folders, and
    finished ones are only read.

    Args:
        config: what to run.
        out: the folder of the result.
        say: called with a line of text as the sweep goes on.
        runs: the folder of the runs' folders; None: `out`.
        device: None takes a GPU if there is one.

    Raises:
        UserError: if a model cannot have a width, `out` has the result of another sweep or cannot
            be written, or there is no such device.
    """
    choices = list(product(sorted(config.widths), config.models))
    state_bytes = {choice: _state_bytes(config, *choice) for choice in choices}
    chosen = choose_device(device, None)
    result = Result(out / f"{config.name}.json", config.header(), origin(chosen), say)
    for width, model in choices:
        place = {"model": NAMES[model], "column": f"C={width}"}
        if result.has(**place, seed=config.task.seed):
            continue
        best = best_run(
            f"{model} C={width}",
            [config.run(model, width, lr) for lr in config.learning_rates],
            (runs or out) / config.name / f"{model}_c{width}",
            chosen,
            say,
            swept=("lr",),
            enough=SOLVED if config.skip_solved else None,
        )
        best["state_bytes"] = state_bytes[width, model]
        result.add(best.pop("accuracy"), **place, seed=config.task.seed, **best)
    return result


def _state_bytes(config: SweepConfig, width: int, model: str) -> int:
    """Return a row's bytes of state; refuse what cannot be built before hours of training."""
    try:
        with torch.device("meta"):
            built = config.run(model, width, config.learning_rates[0]).model.build()
    except ValueError as error:
        raise UserError(f"{model} cannot have width {width}: {error}") from error
    return built.state_bytes(config.task.seq_len)
