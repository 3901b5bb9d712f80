"""What is trained on MQAR and how; the defaults are Zoology's protocol, in full."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from mezzo_core.data.mqar import MQARConfig
from mezzo_core.errors import UserError, nearest

from mezzo_gsa.mqar.model import MIXERS

Precision = Literal["auto", "bf16", "fp32"]
Init = Literal["zoology", "fan_in"]


@dataclass(frozen=True)
class RecallTraining:
    """How every run of a sweep trains; the defaults are Zoology's protocol.

    Attributes:
        task: the rows.
        train_rows: drawn once, for all epochs.
        train_pairs: pairs of the rows to train on, in equal shares, as rows of few pairs teach
            soon what rows of many teach late; empty: the task's.
        test_rows: held out; accuracy is measured on them after every epoch.
        batch_size: rows a step.
        epochs: at most; the learning rate falls from epoch to epoch along half a cosine to 0.
        seconds: no epoch begins when a run has lasted so long; None for no limit.
        num_layers: of the model.
        conv_width: tokens of a short convolution in the place of the first mixer, as Zoology's
            newer protocol has it (3); 0: a mixer there too.
        init: "zoology" draws all matrices from N(0, 0.02); "fan_in" those of mixers from
            N(0, columns^-1/2), so that what they give has a deviation of one at any width.
        seed: of the weights, the order of the rows and dropout.
        precision: "bf16" multiplies matrices in bfloat16, "fp32" is the protocol's; "auto" is
            "bf16" on a GPU.
        compile: use torch.compile.
        graph: on a GPU, replay each step as a CUDA graph; small models are slow without.

    Raises:
        UserError: if a number is out of its range.
    """

    task: MQARConfig = field(default_factory=MQARConfig)
    train_rows: int = 100_000
    train_pairs: tuple[int, ...] = ()
    test_rows: int = 3_000
    batch_size: int = 128
    epochs: int = 64
    seconds: float | None = None
    num_layers: int = 2
    conv_width: int = 0
    init: Init = "zoology"
    seed: int = 123
    precision: Precision = "auto"
    compile: bool = False
    graph: bool = True

    def __post_init__(self) -> None:
        for name in ("train_rows", "test_rows", "batch_size", "epochs", "num_layers"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.conv_width < 0 or (self.conv_width and self.num_layers == 1):
            raise UserError(
                f"conv_width must be 0 or more, and 0 in models of one layer, got {self.conv_width}"
            )
        for num_pairs in self.train_pairs:
            if num_pairs < 1 or self.task.num_pairs % num_pairs:
                raise UserError(
                    f"train_pairs must divide the task's {self.task.num_pairs}, got {num_pairs}"
                )
        if self.train_rows < self.batch_size:
            raise UserError(
                f"train_rows must fill a batch of {self.batch_size}, got {self.train_rows}"
            )
        if self.seconds is not None and not self.seconds > 0:
            raise UserError(f"seconds must be positive, got {self.seconds}")
        for name, choices in (("precision", get_args(Precision)), ("init", get_args(Init))):
            if getattr(self, name) not in choices:
                raise UserError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class SweepConfig:
    """What is swept over.

    Attributes:
        models: names of mixers; by default all but `gsa_one_head`.
        widths: model widths C.
        learning_rates: tried for each model and width, the best of which is reported.
        skip_solved: leave out a model's remaining learning rates at a width where one has solved
            the task already: the best accuracy could hardly change.
        training: what all runs share.

    Raises:
        UserError: if a list is empty or repeats itself, or a value is unknown or out of its range.
    """

    models: tuple[str, ...] = ("attention", "gsa", "gla", "hgrn2", "retnet")
    widths: tuple[int, ...] = (64, 128, 256, 512)
    learning_rates: tuple[float, ...] = (1e-4, 4.64e-4, 2.15e-3, 1e-2)
    skip_solved: bool = False
    training: RecallTraining = field(default_factory=RecallTraining)

    def __post_init__(self) -> None:
        for name in ("models", "widths", "learning_rates"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise UserError(f"{name} must be one or more different values, got {values}")
        for model in self.models:
            if model not in MIXERS:
                raise UserError(f"no model is named {model!r}{nearest(model, MIXERS)}")
        for width in self.widths:
            if width < 1:
                raise UserError(f"widths must be at least 1, got {width}")
        for lr in self.learning_rates:
            if not lr > 0:
                raise UserError(f"learning_rates must be positive, got {lr}")
