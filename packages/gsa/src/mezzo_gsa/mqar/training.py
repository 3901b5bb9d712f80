"""One training on MQAR, with nothing that waits for the GPU between the steps of an epoch."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from mezzo_core.bench import commit
from mezzo_core.data.mqar import MQARConfig, MQARRows
from mezzo_core.device import autocast
from torch import Tensor

from mezzo_gsa.mqar.config import RecallTraining
from mezzo_gsa.mqar.model import RecallModel, build_model

Stopped = Literal["solved", "epochs", "seconds", "diverged"]

SOLVED = 0.99
"""A run stops when its accuracy is above this."""
WEIGHT_DECAY = 0.1
TRAIN_SEED, TEST_SEED = 843828734, 3062119789
"""Of the data: what Zoology draws from its own seed 123."""


class Rows(NamedTuple):
    """`MQARRows` as tensors, on the device of the training."""

    inputs: Tensor
    positions: Tensor
    values: Tensor


def draw_rows(training: RecallTraining, device: torch.device) -> tuple[Rows, Rows]:
    """Draw the rows to train on and those to test on."""
    task, shares = training.task, training.train_pairs or (training.task.num_pairs,)
    num_rows = training.train_rows // len(shares)
    drawn = [replace(task, num_pairs=share).generate(num_rows, TRAIN_SEED) for share in shares]
    parts = zip(*(_to_device(rows, task, device) for rows in drawn), strict=True)
    test = task.generate(training.test_rows, TEST_SEED)
    return Rows(*map(torch.cat, parts)), _to_device(test, task, device)


def _to_device(rows: MQARRows, task: MQARConfig, device: torch.device) -> Rows:
    """Return rows as tensors; in those of fewer pairs than the task's, all is asked repeatedly."""
    inputs, *questions = (torch.from_numpy(part).to(device) for part in rows)
    times = task.num_pairs // rows.values.shape[1]
    return Rows(inputs, *(part.repeat(1, times) for part in questions))


@dataclass(frozen=True)
class Epoch:
    """What one epoch came to: its mean loss in nats, None if no number, and the accuracy after."""

    train_loss: float | None
    accuracy: float


@dataclass(frozen=True)
class RecallRun:
    """A finished training.

    Attributes:
        model: the mixer's name.
        d_model: the model's width C.
        lr: the learning rate of the first epoch.
        accuracy: on the test rows after the last epoch, the share of questions answered right.
        stopped: what ended it: solved, all epochs done, the limit of seconds, or a loss that is no
            number.
        parameters: weights, shared ones once.
        state_bytes: what decoding carries for one row after all its tokens.
        seconds: of the whole run, compilation included.
        commit: of the code that trained it; None if that is no checkout.
        curve: one item an epoch.
    """

    model: str
    d_model: int
    lr: float
    accuracy: float
    stopped: Stopped
    parameters: int
    state_bytes: int
    seconds: float
    commit: str | None
    curve: tuple[Epoch, ...]


def train_run(
    name: str, d_model: int, lr: float, training: RecallTraining, train: Rows, test: Rows
) -> RecallRun:
    """Train one model.

    Args:
        name: of the mixer, in `mezzo_gsa.mqar.model.MIXERS`.
        d_model: the model's width C.
        lr: learning rate of the first epoch.
        training: what all runs share.
        train: rows from `draw_rows`.
        test: rows from `draw_rows`.
    """
    start = time.perf_counter()
    device = train.inputs.device
    torch.manual_seed(training.seed)
    order = torch.Generator(device).manual_seed(training.seed)
    task = training.task
    model = build_model(
        name,
        d_model,
        vocab_size=task.vocab_size,
        seq_len=task.seq_len,
        num_layers=training.num_layers,
        conv_width=training.conv_width,
        fan_in=training.init == "fan_in",
    ).to(device)
    step = TrainStep(model, train, training)
    curve: list[Epoch] = []
    stopped: Stopped | None = None
    while stopped is None:
        step.begin_epoch(lr * (1 + math.cos(math.pi * len(curve) / training.epochs)) / 2)
        loss = _train_epoch(step, train, training.batch_size, order)
        accuracy = measure_accuracy(model, test, training)
        curve.append(Epoch(loss if math.isfinite(loss) else None, accuracy))
        stopped = _reason_to_stop(curve, training, time.perf_counter() - start)
    return RecallRun(
        model=name,
        d_model=d_model,
        lr=lr,
        accuracy=accuracy,
        stopped=stopped,
        parameters=sum(weight.numel() for weight in model.parameters()),
        state_bytes=model.state_bytes(task.seq_len),
        seconds=time.perf_counter() - start,
        commit=commit(),
        curve=tuple(curve),
    )


def _reason_to_stop(
    curve: Sequence[Epoch], training: RecallTraining, seconds: float
) -> Stopped | None:
    if curve[-1].train_loss is None:
        return "diverged"
    if curve[-1].accuracy > SOLVED:
        return "solved"
    if len(curve) == training.epochs:
        return "epochs"
    return "seconds" if training.seconds is not None and seconds > training.seconds else None


def _train_epoch(
    step: "TrainStep", train: Rows, batch_size: int, generator: torch.Generator
) -> float:
    """Take every row once, in a new order, and return the mean loss.

    Rows that do not fill a batch are left out; another epoch has others.
    """
    order = torch.randperm(len(train.inputs), device=train.inputs.device, generator=generator)
    for rows in order[: len(order) // batch_size * batch_size].split(batch_size):
        step(rows)
    return step.take_mean_loss()


class TrainStep:
    """One step of AdamW on the rows whose numbers it is given.

    On a GPU the first steps run as they are, on the stream of the capture, and warm up what
    compiles itself; the next is captured as a CUDA graph, and all later ones replay it.
    """

    WARM_UP = 3

    def __init__(self, model: RecallModel, train: Rows, training: RecallTraining) -> None:
        device = train.inputs.device
        self._model, self._train, self._training = model, train, training
        self._answer: Callable[[Tensor, Tensor], Tensor] = model
        if training.compile:
            torch._dynamo.reset()  # otherwise models of other runs use up its limit of versions
            self._answer = torch.compile(model, dynamic=False)
        self._lr = torch.zeros((), device=device)  # a graph reads it from where it is
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=self._lr, weight_decay=WEIGHT_DECAY, fused=True
        )
        self._rows = torch.zeros(training.batch_size, dtype=torch.int64, device=device)
        self._total_loss = torch.zeros((), device=device)
        self._count = self._steps = 0
        graphed = training.graph and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if graphed else None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, rows: Tensor) -> None:
        """Step on `rows`, (batch_size,) int64."""
        self._rows.copy_(rows)
        if self._stream is None:
            self._compute()
        elif self._steps < self.WARM_UP:
            here = torch.cuda.current_stream(rows.device)
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                self._compute()
            here.wait_stream(self._stream)
        else:
            if self._graph is None:
                self._graph = self._capture(self._stream)
            self._graph.replay()
        self._steps += 1
        self._count += 1

    def begin_epoch(self, lr: float) -> None:
        """Set the learning rate of the steps to come, and let the model train again."""
        self._lr.fill_(lr)
        self._model.train()

    def take_mean_loss(self) -> float:
        """Return the mean loss since the last such call; waits for the GPU."""
        mean = self._total_loss.item() / self._count
        self._total_loss.zero_()
        self._count = 0
        return mean

    def _capture(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        for group in self._optimizer.param_groups:  # told earlier, it warns of the steps before
            group["capturable"] = True
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._compute()
        return graph

    def _compute(self) -> None:
        inputs, positions, values = (part[self._rows] for part in self._train)
        with autocast(inputs.device, self._training.precision):
            logits = self._answer(inputs, positions)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), values.flatten())
        loss.backward()
        self._optimizer.step()
        # Without gradients when the next step begins, a replay writes new ones and adds to none.
        self._optimizer.zero_grad(set_to_none=True)
        self._total_loss += loss.detach()


@torch.no_grad()
def measure_accuracy(model: RecallModel, test: Rows, training: RecallTraining) -> float:
    """Return the share of the questions whose likeliest token is the right one.

    All rows have as many questions, so it is also the mean over rows of each row's share.
    """
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=test.inputs.device)
    for inputs, positions, values in zip(
        *(part.split(training.batch_size) for part in test), strict=True
    ):
        with autocast(inputs.device, training.precision):
            logits = model(inputs, positions)
        right += (logits.argmax(-1) == values).sum()
    return right.item() / test.values.numel()
