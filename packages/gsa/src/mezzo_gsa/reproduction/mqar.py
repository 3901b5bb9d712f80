"""A sweep on MQAR over models, widths and learning rates: Zoology's protocol, and the authors'."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from mezzo_core.config_json import check_fields, check_rules, differences
from mezzo_core.device import choose_device
from mezzo_core.errors import UserError, nearest
from mezzo_core.nn import AttentionConfig, BlockConfig, BlocksConfig, LMConfig, MixerConfig
from mezzo_core.nn.on_meta import on_meta
from mezzo_core.reproduction import Cell, Header, Result
from mezzo_core.reproduction.runner import Job, fill
from mezzo_core.reproduction.training import Tuning
from mezzo_core.train.config import OptimConfig, Precision, TrainConfig

from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.hgrn2 import HGRN2Config, lower_bounds
from mezzo_gsa.mqar.blocks import MixerOnlyConfig, PositionsConfig
from mezzo_gsa.mqar.task import MQARConfig
from mezzo_gsa.recipes import PAPER_NAMES
from mezzo_gsa.retnet import RetNetConfig

SOLVED = 0.99
"""A run ends when its accuracy is above this."""
DROPOUT = 0.1  # of the embeddings
LAYERS = {"zoology": 2, "authors": 4}


def _authors_gsa(num_heads: int, width: int) -> GSAConfig:
    return GSAConfig(num_heads, num_slots=width // 4, damping=16.0, scale=None)


MIXERS: dict[str, dict[str, Callable[[int, float], MixerConfig]]] = {
    "zoology": {
        "attention": lambda width, bound: AttentionConfig(head_dim=width, rope_base=None),
        "gsa": lambda width, bound: GSAConfig(4),  # heads as in the paper's 1.3B model
        "gsa_one_head": lambda width, bound: GSAConfig(1),
        "gla": lambda width, bound: GLAConfig(num_heads=1),
        # Wider models have several heads: its state is head_dim * C whatever their number.
        "hgrn2": lambda width, bound: HGRN2Config(head_dim=min(width, 128), lower_bound=bound),
        "retnet": lambda width, bound: RetNetConfig(num_heads=1),
    },
    "authors": {
        "attention": lambda width, bound: AttentionConfig(head_dim=width, rope_base=None),
        "gsa": lambda width, bound: _authors_gsa(4, width),
        "gsa_one_head": lambda width, bound: _authors_gsa(1, width),
        "gla": lambda width, bound: GLAConfig(num_heads=2, expand_k=1.0),
        "hgrn2": lambda width, bound: HGRN2Config(head_dim=width // 2),
        "retnet": lambda width, bound: RetNetConfig(num_heads=2),
    },
}
"""The mixers of each protocol, from the model's width and the lower bound of HGRN2's gates."""
NAMES = {name: PAPER_NAMES.get(name, "GSA, one head") for name in MIXERS["zoology"]}
"""The models, and what they are called in a result."""
SETTINGS = {
    "zoology": (
        "MQAR by Zoology's protocol: T 512, 64 pairs, vocabulary 8,192; two layers of LayerNorm "
        "and mixer with one head (GSA: four, or one where it says so; HGRN2: of width 128 at "
        f"most), embedding tied, dropout {DROPOUT} on it; 100,000 rows, 3,000 test rows, batch "
        "128, at most 64 epochs, AdamW with decay 0.1 of matrices, cosine to 0, the best of four "
        "learning rates, fp32. Unlike Zoology's models: RMSNorm before the head, no biases in "
        "projections, no dropout inside attention, no smaller start for output projections, no "
        "second normalized residual in place of the MLP"
    ),
    "authors": (
        "MQAR as in the public program of GSA's first author, a fork of Zoology: T 512, 64 pairs, "
        "vocabulary 8,192; four layers of LayerNorm, mixer and an identity as the MLP; GSA with "
        "four heads (or one where it says so) of C/4 slots, damping 16, scale D^-1/2; GLA, HGRN2 "
        "and RetNet with two heads, GLA's keys as wide as the model, HGRN2's gates without lower "
        f"bounds; attention with one; embedding tied, dropout {DROPOUT} on it; 100,000 rows, 3,000 "
        "test rows, batch 128, at most 64 epochs, AdamW with decay 0.1 of matrices, cosine to 0, "
        "the best of six learning rates, fp32. Unlike that program: RMSNorm before the head, no "
        "decay of vectors, the rate falls by step; in attention no biases, no dropout, no smaller "
        "start for output projections"
    ),
}
"""What the protocols are, for a result's setting."""


@dataclass(frozen=True)
class SweepConfig:
    """What is swept over, and what all runs share; the defaults are Zoology's protocol.

    Raises:
        UserError: if a model is unknown, there is no learning rate, or the rows fill no batch.
    """

    task: MQARConfig = field(default_factory=MQARConfig)  # its seed sets weights and dropout too
    models: tuple[str, ...] = ("attention", "gsa", "gla", "hgrn2", "retnet")  # of `NAMES`
    widths: tuple[int, ...] = (64, 128, 256, 512)
    learning_rates: tuple[float, ...] = (1e-4, 4.64e-4, 2.15e-3, 1e-2)  # tried in this order
    skip_solved: bool = False  # try no further rates at a width where one has solved the task
    batch_size: int = 128
    epochs: int = 64  # at most; accuracy is measured after each
    precision: Precision = "fp32"
    compile: bool = False
    cuda_graph: bool = False
    protocol: Literal["zoology", "authors"] = "zoology"
    """Whose layers (`LAYERS`, `MIXERS`); a result is compared with this one of `PROTOCOLS`."""

    def __post_init__(self) -> None:
        check_fields(self)
        for model in self.models:
            if model not in NAMES:
                raise UserError(f"no model is named {model!r}{nearest(model, NAMES)}")
        rows, rates = self.task.train_rows, self.learning_rates
        rules = {
            "learning_rates": (len(rates) > 0, "at least one"),
            "batch_size": (1 <= self.batch_size <= rows, f"from 1 to train_rows = {rows}"),
            "epochs": (self.epochs >= 1, "at least 1"),
        }
        check_rules(self, rules)

    @property
    def name(self) -> str:
        """Of the result."""
        return "mqar" if self.protocol == "zoology" else f"mqar_{self.protocol}"

    def run(self, model: str, width: int, lr: float) -> TrainConfig:
        """Return one training: the model's name in `NAMES`, the width C, the learning rate."""
        epoch = self.task.train_rows // self.batch_size
        mixer, has_identity = MIXERS[self.protocol][model], self.protocol == "authors"
        first, *others = (
            MixerOnlyConfig(mixer(width, bound), identity_mlp=has_identity)
            for bound in lower_bounds(LAYERS[self.protocol])
        )
        blocks: tuple[BlockConfig, ...] = (replace(first, dropout=DROPOUT), *others)
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
            cuda_graph=self.cuda_graph,
        )

    def header(self) -> Header:
        """Return the head of the result: the protocol, and what is not as there."""
        whole = PROTOCOLS[self.protocol]
        changes = differences(self.task, whole.task)
        changes += differences(self, whole, ("task", "models", "compile", "cuda_graph"))
        is_whole = not changes and set(whole.models) <= set(self.models)
        return Header(
            kind="recall",
            title="Figure 3a: recall (MQAR)"
            + (", the authors' setting" if self.protocol == "authors" else ""),
            setting=SETTINGS[self.protocol] + (f". Here: {'; '.join(changes)}" if changes else ""),
            how="the paper's setting" if is_whole else "scaled down",
            columns=tuple(f"C={width}" for width in sorted(self.widths)),
            models=tuple(NAMES[model] for model in self.models),
            unit="accuracy",
            better="higher",
        )

    def job(self, model: str, width: int, runs: Path) -> Job:
        """Return the job that trains a model at a width with each learning rate.

        Raises:
            UserError: if the model cannot have this width.
        """
        try:
            configs = [self.run(model, width, lr) for lr in self.learning_rates]
            state_bytes = on_meta(configs[0].model).state_bytes(self.task.seq_len)
        except ValueError as error:
            raise UserError(f"{model} of width {width} cannot be trained: {error}") from error
        seed = self.task.seed
        cells = (Cell(NAMES[model], f"C={width}", seed=seed),)
        work = Tuning(
            f"{model} C={width} seed {seed}",
            cells,
            configs,
            runs / self.name / f"{model}_c{width}_seed{seed}",
            enough=SOLVED if self.skip_solved else None,
            details={"state_bytes": state_bytes},
        )
        return Job(cells, work)


def sweep(config: SweepConfig, out: Path, *, device: str | None = None, jobs: int = 1) -> Result:
    """Train everything that `config` asks for, narrow models first, so many jobs at a time.

    A sweep that was killed goes on: runs resume from their own folders in `out`, and finished ones
    are only read.

    Raises:
        UserError: if a model cannot have a width, `out` has the result of another sweep or cannot
            be written, or there is no such device.
    """
    path, chosen = out / f"{config.name}.json", choose_device(device, None)
    every = [config.job(m, width, out) for width in sorted(config.widths) for m in config.models]
    return fill(path, vars(config.header()), every, out, chosen, processes=jobs)


PROTOCOLS = {
    "zoology": SweepConfig(),
    "authors": SweepConfig(
        protocol="authors",
        # From the middle, so that `skip_solved` soon finds one.
        learning_rates=(2e-3, 1e-3, 5e-3, 5e-4, 1e-2, 1e-4),
    ),
}
"""Zoology's (Arora et al. 2023), and the last version of the public program of GSA's first author.

Which version of that program drew the paper's figure is not known; the paper says 512 tokens and 64
pairs only.
"""
