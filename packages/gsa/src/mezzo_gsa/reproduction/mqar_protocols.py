"""What a sweep on MQAR trains: Zoology's protocol, and that of GSA's authors."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
from mezzo_core.config_json import check_fields
from mezzo_core.errors import UserError, nearest
from mezzo_core.nn import AttentionConfig, BlockConfig, BlocksConfig, LMConfig, MixerConfig
from mezzo_core.reproduction import Header
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
GSA_HEADS = {"gsa": 4, "gsa_one_head": 1}  # four as in the paper's 1.3B model
OTHERS: dict[str, dict[str, Callable[[int, float], MixerConfig]]] = {
    "zoology": {
        "gla": lambda width, bound: GLAConfig(num_heads=1),
        # Wider models have several heads: its state is head_dim * C whatever their number.
        "hgrn2": lambda width, bound: HGRN2Config(head_dim=min(width, 128), lower_bound=bound),
        "retnet": lambda width, bound: RetNetConfig(num_heads=1),
    },
    "authors": {
        "gla": lambda width, bound: GLAConfig(num_heads=2, expand_k=1.0),
        "hgrn2": lambda width, bound: HGRN2Config(head_dim=width // 2),
        "retnet": lambda width, bound: RetNetConfig(num_heads=2),
    },
}
"""The baselines of each protocol, from the model's width and the lower bound of HGRN2's gates."""
NAMES = {
    name: PAPER_NAMES.get(name, "GSA, one head")
    for name in ("attention", *GSA_HEADS, *OTHERS["zoology"])
}
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

    Attributes:
        task: the rows; its seed is that of the weights and of dropout too.
        models: of `NAMES`; by default all but `gsa_one_head`.
        widths: model widths C.
        learning_rates: tried in this order for each model and width; each falls along half a
            cosine to 0.
        skip_solved: try no further learning rates for a model at a width where one has solved the
            task: the best accuracy could hardly change.
        batch_size: rows a step.
        epochs: at most; accuracy is measured after each.
        conv_width: tokens of a short convolution in the place of the first mixer, as Zoology's
            newer protocol has it (3); 0: a mixer there too.
        init: "zoology" draws all matrices from N(0, 0.02); for "fan_in" see `MixerOnlyConfig`.
        precision, compile, cuda_graph: as of `TrainConfig`.
        protocol: whose baselines (`OTHERS`); a result is compared with this one of `PROTOCOLS`.
        num_layers: mixers, a convolution counted.
        num_slots: M of a head of GSA; a number below 1 is that share of C.
        damping: of GSA's gates.
        scale: of GSA's slot logits: "one", or "head_width" for D^-1/2.
        identity_mlp: see `MixerOnlyConfig`.

    Raises:
        UserError: if a model is unknown, the rows do not fill a batch, or a number cannot be.
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
    cuda_graph: bool = False
    protocol: Literal["zoology", "authors"] = "zoology"
    num_layers: int = 2
    num_slots: float = 64
    damping: float = 8.0
    scale: Literal["one", "head_width"] = "one"
    identity_mlp: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for model in self.models:
            if model not in NAMES:
                raise UserError(f"no model is named {model!r}{nearest(model, NAMES)}")
        rows, slots, rates = self.task.train_rows, self.num_slots, self.learning_rates
        positive = len(rates) > 0 and all(0 < lr < math.inf for lr in rates)
        least = 2 if self.conv_width else 1  # the convolution takes the place of the first mixer
        rules = {
            "learning_rates": (positive, "positive and finite" if rates else "at least one"),
            "batch_size": (1 <= self.batch_size <= rows, f"from 1 to train_rows = {rows}"),
            "epochs": (self.epochs >= 1, "at least 1"),
            "conv_width": (self.conv_width >= 0, "at least 0"),
            "num_layers": (self.num_layers >= least, f"at least {least}"),
            "num_slots": (0 < slots < 1 or slots == slots // 1 > 0, "a whole number or below 1"),
            "damping": (0 < self.damping < math.inf, "positive and finite"),
        }
        for name, (is_met, allowed) in rules.items():
            if not is_met:
                raise UserError(f"{name} must be {allowed}, got {getattr(self, name)}")

    @property
    def name(self) -> str:
        """Of the result: "mqar", and words such as "_authors", "_conv" or "_4_layers"."""
        theirs = PROTOCOLS[self.protocol]
        words = {
            self.protocol: self.protocol != "zoology",
            "conv": self.conv_width > 0,
            self.init: self.init != theirs.init,
            f"{self.num_layers}_layers": self.num_layers != theirs.num_layers,
            f"{self.num_slots:g}_slots": self.num_slots != theirs.num_slots,
            f"damping_{self.damping:g}": self.damping != theirs.damping,
            f"scale_{self.scale}": self.scale != theirs.scale,
            f"{'' if self.identity_mlp else 'no_'}identity": self.identity_mlp
            != theirs.identity_mlp,
        }
        return "_".join(["mqar", *(word for word, is_other in words.items() if is_other)])

    def run(self, model: str, width: int, lr: float) -> TrainConfig:
        """Return one training: the model's name in `NAMES`, the width C, the learning rate.

        Raises:
            UserError: if that share of the width is no number of slots.
        """
        epoch = self.task.train_rows // self.batch_size
        mixers = [self._mixer(model, width, bound) for bound in lower_bounds(self.num_layers)]
        if self.conv_width:
            mixers[0] = ShortConvConfig(self.conv_width)
        first, *others = (
            MixerOnlyConfig(each, fan_in=self.init == "fan_in", identity_mlp=self.identity_mlp)
            for each in mixers
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

    def _mixer(self, model: str, width: int, bound: float) -> MixerConfig:
        if model == "attention":
            return AttentionConfig(head_dim=width, rope_base=None)
        if model in OTHERS[self.protocol]:
            return OTHERS[self.protocol][model](width, bound)
        slots = self.num_slots * width if self.num_slots < 1 else self.num_slots
        if not math.isclose(slots, round(slots)):
            raise UserError(
                f"num_slots {self.num_slots} of width {width} is {slots:g}, no whole number"
            )
        scale = 1.0 if self.scale == "one" else None
        return GSAConfig(
            GSA_HEADS[model], num_slots=round(slots), damping=self.damping, scale=scale
        )

    def state_bytes(self, model: str, width: int) -> int:
        """Return the bytes of state of a row.

        Raises:
            UserError: if the model cannot have this width.
        """
        try:
            with torch.device("meta"):
                built = self.run(model, width, self.learning_rates[0]).model.build()
        except ValueError as error:
            raise UserError(f"{model} cannot have width {width}: {error}") from error
        return built.state_bytes(self.task.seq_len)

    def header(self) -> Header:
        """Return the head of the result: the protocol, and what is not as there."""
        whole = PROTOCOLS[self.protocol]
        changes = [
            f"{each.name} {getattr(ours, each.name)}, not {getattr(protocols, each.name)}"
            for ours, protocols in ((self.task, whole.task), (self, whole))
            for each in fields(protocols)
            if getattr(ours, each.name) != getattr(protocols, each.name)
            and each.name not in ("task", "models", "compile", "cuda_graph")
        ]
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


PROTOCOLS = {
    "zoology": SweepConfig(),
    "authors": SweepConfig(
        protocol="authors",
        # From the middle, so that `skip_solved` soon finds one.
        learning_rates=(2e-3, 1e-3, 5e-3, 5e-4, 1e-2, 1e-4),
        num_layers=4,
        num_slots=0.25,
        damping=16.0,
        scale="head_width",
        identity_mlp=True,
    ),
}
"""Zoology's (Arora et al. 2023), and the last version of the public program of GSA's first author.

Which version of that program drew the paper's figure is not known; the paper says 512 tokens and 64
pairs only.
"""
