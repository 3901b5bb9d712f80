"""Collects losses on the device until they are read, and measures the speed of training."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from mezzo_core.train.distributed import World
from mezzo_core.train.stopping import StopRequest

_SLOW_SECONDS = 1.0


class _OnGPU(TypedDict, total=False):
    mfu: float
    """Model FLOPs utilization: the share of the GPUs' peak that the model's matrix products took;
    in bf16 on a GPU whose peak is known (`mezzo_core.train.peaks`)."""
    peak_gb: float
    """The most memory that tensors have taken on the first process's GPU, in 10^9 bytes."""


class StepRow(_OnGPU):
    """One optimizer step, as it is written to log.jsonl."""

    step: int
    """Steps done, including this one; the first is 1."""
    loss: float
    """Mean cross entropy over the targets of the whole batch, before the step."""
    lr: float
    grad_norm: float
    """Global norm of the gradient, before clipping."""
    tokens: int
    """Tokens read since the run began."""
    tokens_per_second: float
    """Speed of the steps since the last reading, without evaluations and checkpoints."""
    time: float
    """Unix time of the reading."""


class _Pending(NamedTuple):
    step: int
    lr: float
    loss: Tensor
    grad_norm: Tensor


class Meter:
    """Collects steps without waiting for the device, and turns them into rows.

    Reading a loss makes the host wait until the GPU has computed it. So the loop only adds tensors,
    and reads them every `read_every` steps. At a reading the processes also agree whether to stop.
    """

    def __init__(
        self,
        world: World,
        tokens_per_step: int,
        stop: StopRequest,
        peak_speed: float | None = None,
    ) -> None:
        """Measure from now on; `peak_speed` is that of `mezzo_core.train.peaks`."""
        self.world = world
        self._peak_speed = peak_speed
        self.stop = stop
        self._agreed_to_stop = False
        self.tokens_per_step = tokens_per_step
        self._most_steps = self.read_every = 10 if world.device.type == "cuda" else 1
        self._pending: list[_Pending] = []
        self._started = time.perf_counter()
        self._seconds: list[tuple[int, float]] = []

    def add(self, step: int, lr: float, loss: Tensor, grad_norm: Tensor) -> None:
        """Add a step's results; the batch's mean loss is the sum of all processes' `loss`."""
        self._pending.append(_Pending(step, lr, loss.detach(), grad_norm))

    @property
    def is_due(self) -> bool:
        """Whether enough steps have been added for a reading, or the run must stop."""
        return self.must_stop or len(self._pending) >= self.read_every

    @property
    def must_stop(self) -> bool:
        """Whether the run was asked to end; all processes give the same answer."""
        return self.stop.is_made if self.world.size == 1 else self._agreed_to_stop

    def read(self) -> list[StepRow]:
        """Wait for the device, and return the steps since the last reading."""
        if not self._pending:
            return []
        steps, self._pending = self._pending, []
        count, seconds = self._seconds[-1] if self._seconds else (1, 0.0)
        is_slow = self.world.is_first and seconds / count > _SLOW_SECONDS
        asked = steps[0].loss.new_tensor([self.stop.is_made, is_slow])
        sums = torch.cat([torch.stack([step.loss for step in steps]), asked])
        *losses, stops, slow = self.world.sum(sums).tolist()
        self._agreed_to_stop = stops > 0
        # With slow steps, waiting for the device costs little and a stop request is seen sooner.
        self.read_every = 1 if slow else self._most_steps
        grad_norms = torch.stack([step.grad_norm for step in steps]).tolist()
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        self._seconds.append((len(steps), seconds))
        speed = len(steps) * self.tokens_per_step / seconds
        on_gpu = _OnGPU()
        if self._peak_speed is not None:
            on_gpu["mfu"] = speed / self._peak_speed
        if self.world.device.type == "cuda":
            on_gpu["peak_gb"] = torch.cuda.max_memory_allocated(self.world.device) / 1e9
        return [
            StepRow(
                step=step.step,
                loss=loss,
                lr=step.lr,
                grad_norm=grad_norm,
                tokens=step.step * self.tokens_per_step,
                tokens_per_second=speed,
                time=time.time(),
                **on_gpu,
            )
            for step, loss, grad_norm in zip(steps, losses, grad_norms, strict=True)
        ]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of this context out of the speed. Call `read` before it."""
        yield
        self._started = time.perf_counter()

    @property
    def tokens_per_second(self) -> float:
        """The speed of all steps except those of the first reading, which includes warm-up."""
        counted = self._seconds[1:] or self._seconds
        steps, seconds = sum(n for n, _ in counted), sum(s for _, s in counted)
        return steps * self.tokens_per_step / seconds if seconds else 0.0
