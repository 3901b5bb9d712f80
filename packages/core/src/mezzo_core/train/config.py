"""Configuration of a training run: frozen dataclasses that check their values when they are built.

A recipe is a function that returns a `TrainConfig`; a variant is `dataclasses.replace`.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from mezzo_core.config_json import check_fields, check_rules
from mezzo_core.data import DataConfig, SourceConfig
from mezzo_core.errors import UserError
from mezzo_core.nn.lm import LMConfig

Precision = Literal["auto", "fp32", "bf16"]
Track = Literal["tensorboard", "trackio", "wandb"]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, its learning-rate schedule and its clipping (`mezzo_core.train.optim` builds them).

    Attributes:
        lr: the highest learning rate, reached at the end of the warm-up.
        min_lr: the learning rate at the end of the cosine.
        warmup_fraction: share of all steps in which the rate rises linearly.
        betas: AdamW's decay rates of its two moments.
        weight_decay: of matrices only; vectors, such as norm scales and biases, are not decayed.
        clip: the largest global gradient norm; inf turns clipping off.
    """

    lr: float = 3e-3
    min_lr: float = 1e-6
    warmup_fraction: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        rules = {
            "lr": (0 < self.lr < math.inf, "above 0"),
            "min_lr": (0 <= self.min_lr <= self.lr, f"from 0 to lr = {self.lr}"),
            "warmup_fraction": (0 <= self.warmup_fraction <= 1, "from 0 to 1"),
            "betas": (all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "0 or more"),
            "clip": (self.clip > 0, "above 0 (inf clips nothing)"),
        }
        check_rules(self, rules)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained, whatever the model.

    Attributes:
        data: the corpus and its tokenizer, or a task.
        optim: the optimizer and its schedule.
        seq_len: T, tokens of a sequence.
        batch_size: sequences of an optimizer step, over all processes.
        micro_batch_size: sequences that a process computes at a time; their gradients are
            accumulated. None takes the process's whole share of the batch at once.
        steps: number of optimizer steps.
        seed: seed of the initial weights (the data's order has its own, `data.seed`).
        eval_every: steps between evaluations; the last step is always evaluated.
        eval_batches: how many batches an evaluation reads; None reads all of the validation part.
        stop_at_accuracy: the run ends after the first evaluation whose accuracy is above this (a
            share from 0 to 1), even if steps are left; None does all steps.
        checkpoint_every: steps between checkpoints; the last step is always saved.
        keep_checkpoints: how many of the newest checkpoints are kept.
        precision: "bf16" is autocast with float32 weights; "auto" is "bf16" on a GPU, else "fp32".
        compile: run the model through torch.compile: a small one whole, a large one layer by layer,
            so that the first step does not take longer for more layers.
        cuda_graph: on a GPU, replay each step as a CUDA graph, once two with its shapes have run
            (four graphs at most): for models so small that the host is slower than the GPU, in one
            process. Losses are the same up to rounding. A graph keeps the memory that a step needs.
        activation_checkpointing: keep the input of each layer alone for the backward, which
            computes the rest again: less memory, and one more forward.
        shard: whether each process holds a part of the model. False: a whole copy of the weights,
            gradients and AdamW moments, 16 bytes a parameter (20 while gradients are exchanged).
            True: its part of them, with 4 bytes a parameter between micro batches (FSDP2); the
            weights are gathered whenever they are needed. None shards if a copy would take more
            than half of a GPU's memory. Losses and checkpoints are the same.
        context_parallel: P, the processes that share each sequence. Each has a part of its tokens
            and passes the states of all layers on to the next: for sequences that are too long for
            one GPU's memory, or too slow. Packed documents cannot be shared.
        track: also send the log to this tracker.
        init_from: a folder that `save_model` wrote. Training starts from its weights, which must
            fit the model. With None the initial weights are random.
    """

    data: SourceConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    seq_len: int = 512
    batch_size: int = 8
    micro_batch_size: int | None = None
    steps: int = 300
    seed: int = 0
    eval_every: int = 100
    eval_batches: int | None = None
    stop_at_accuracy: float | None = None
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    precision: Precision = "auto"
    compile: bool = False
    cuda_graph: bool = False
    activation_checkpointing: bool = False
    shard: bool | None = None
    context_parallel: int = 1
    track: Track | None = None
    init_from: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        counts = ("seq_len", "batch_size", "steps", "eval_every", "checkpoint_every")
        batches, most = self.eval_batches, self.stop_at_accuracy
        parts = self.micro_batch_size
        rules = {
            **{name: (_is_count(getattr(self, name)), _COUNT) for name in counts},
            "keep_checkpoints": (_is_count(self.keep_checkpoints), _COUNT),
            "seed": (self.seed >= 0, "from 0 to 2^63 - 1"),
            "context_parallel": (
                1 <= self.context_parallel <= self.seq_len,
                f"from 1 to seq_len = {self.seq_len}",
            ),
            "eval_batches": (batches is None or _is_count(batches), f"{_COUNT} (or None)"),
            "stop_at_accuracy": (most is None or 0 <= most <= 1, "from 0 to 1 (or None)"),
            "micro_batch_size": (
                parts is None or (parts >= 1 and self.batch_size % parts == 0),
                f"a divisor of batch_size = {self.batch_size} (or None)",
            ),
        }
        check_rules(self, rules)
        if self.cuda_graph and self.activation_checkpointing:
            raise UserError("cuda_graph and activation_checkpointing do not go together")


@dataclass(frozen=True)
class TrainConfig(Training):
    """The full configuration of a training run: the same configuration gives the same model.

    Attributes:
        name: the recipe's name, stored with the model.
        model: the language model.
    """

    name: str
    model: LMConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self, {"name": (bool(self.name.strip()), "a name that is not empty")})


_COUNT = "from 1 to 2^31 - 1"


def _is_count(value: int) -> bool:
    return 1 <= value < 2**31
