"""What a run shows and keeps: a progress bar or lines, log.jsonl, a tracker, the loss's figure."""

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from mezzo_core.errors import UserError
from mezzo_core.eval.perplexity import Perplexity
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.meter import StepRow

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where rows can be sent too."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Take one row; `step` is among its keys."""
        ...

    def close(self) -> None:
        """Send what waits."""
        ...


class RunLog:
    """The log of one run, a context manager. Only the active process shows and writes anything.

    log.jsonl holds one object a line, each step once: on resuming, what came after the checkpoint
    is removed before anything is added. An evaluation's row has `val_loss` in place of `loss`.
    """

    def __init__(
        self, out: Path, config: TrainConfig, *, done: int, active: bool, quiet: bool
    ) -> None:
        self.out = out
        self.config = config
        self.active = active
        self.rows = _rows_until(out / "log.jsonl", done)
        self._done = done
        self._line_every = max(1, min(config.steps // 20, 100))
        self._console = Console(stderr=True)
        self._lines = active and not quiet and not self._console.is_terminal
        self._bar = _progress(self._console) if active and not quiet and not self._lines else None
        self._task: TaskID | None = None
        self._tracker: Tracker | None = None

    def __enter__(self) -> "RunLog":
        if self.active:
            _rewrite(self.out / "log.jsonl", self.rows)
            self._file = (self.out / "log.jsonl").open("a", encoding="utf-8", buffering=1)
            if self.config.track is not None:
                self._tracker = _open_tracker(self.config.track, self.config.name, self.out)
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(
                self.config.name, total=self.config.steps, completed=self._done, loss="", speed=""
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self.active:
            self._file.close()
        if self._tracker is not None:
            self._tracker.close()

    def note(self, text: str) -> None:
        """Say something about the run as a whole."""
        self._say(text)

    def step(self, row: StepRow) -> None:
        """Keep and show one step."""
        self._keep(row)
        loss, speed = f"{row['loss']:.4f}", f"{row['tokens_per_second']:,.0f} tokens/s"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=row["step"], loss=loss, speed=speed)
        elif row["step"] % self._line_every == 0 or row["step"] == self.config.steps:
            self._say(f"step {row['step']}/{self.config.steps}: loss {loss}, {speed}")

    def evaluation(self, step: int, found: Perplexity) -> None:
        """Keep and show one evaluation, made after `step` steps."""
        self._keep(
            {
                "step": step,
                "val_loss": found.loss,
                "val_perplexity": found.perplexity,
                "val_bits_per_byte": found.bits_per_byte,
                "val_tokens": found.tokens,
                "time": time.time(),
            }
        )
        self._say(
            f"step {step}/{self.config.steps}: validation loss {found.loss:.4f}, "
            f"perplexity {found.perplexity:.3f}"
        )

    def sync(self) -> None:
        """Put the rows on disk: a checkpoint must not be newer than its log."""
        if self.active:
            os.fsync(self._file.fileno())

    def plot(self) -> None:
        """Draw loss.png: training and validation loss over tokens."""
        if self.active:
            draw_losses(self.rows, self.out / "loss.png", self.config)

    def _keep(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))
        if self.active:
            self._file.write(json.dumps(row) + "\n")
        if self._tracker is not None:
            self._tracker.log(row)

    def _say(self, text: str) -> None:
        line = f"{self.config.name}: {text}"
        if self._bar is not None or self._lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif self.active:
            logger.info(line)


def draw_losses(rows: list[dict[str, Any]], path: Path, config: TrainConfig) -> None:
    """Draw the losses of a log over the tokens read, as a PNG.

    Args:
        rows: of log.jsonl.
        path: the file to write.
        config: of the run, for its name and its tokens a step.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="tokens", ylabel="loss (nats a token)", title=config.name)
    per_step = config.batch_size * config.seq_len
    for key, label, style in (("loss", "training", "-"), ("val_loss", "validation", "o-")):
        points = [(row["step"] * per_step, row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=3, linewidth=1)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _rows_until(path: Path, done: int) -> list[dict[str, Any]]:
    """Read the rows of the first `done` steps."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # a kill cut the line that was being written
                continue
            if row["step"] <= done:
                rows.append(row)
    return rows


def _rewrite(path: Path, rows: list[dict[str, Any]]) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    scratch.replace(path)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
    )


class _TensorBoard:
    def __init__(self, out: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                'track="tensorboard" needs the package tensorboard: pip install "mezzo-core[track]"'
            ) from None
        self._writer = SummaryWriter(str(out / "tensorboard"))

    def log(self, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            if key not in ("step", "time") and value is not None:
                self._writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, project: str, out: Path) -> None:
        try:
            import trackio
        except ImportError:
            raise UserError(
                'track="trackio" needs the package trackio: pip install "mezzo-core[track]"'
            ) from None
        self._trackio = trackio
        trackio.init(project=project, name=out.name, resume="allow")

    def log(self, row: Mapping[str, Any]) -> None:
        values = {key: value for key, value in row.items() if key != "step" and value is not None}
        self._trackio.log(values, step=row["step"])

    def close(self) -> None:
        self._trackio.finish()


def _open_tracker(track: str, project: str, out: Path) -> Tracker:
    return _TensorBoard(out) if track == "tensorboard" else _Trackio(project, out)
