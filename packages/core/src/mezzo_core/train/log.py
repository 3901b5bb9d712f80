"""The output of a run: a progress bar or lines, log.jsonl, a tracker, losses as a figure."""

import csv
import io
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
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

from mezzo_core.console import if_read, show
from mezzo_core.errors import UserError, printable
from mezzo_core.eval.evaluate import Evaluation
from mezzo_core.files import is_number, parse_json, write_whole
from mezzo_core.libraries import import_library
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.folder import naming
from mezzo_core.train.meter import StepRow

logger = logging.getLogger(__name__)

_MOST_ROW_BYTES = 1 << 16


class Tracker(Protocol):
    """A service that also receives the rows of the log."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Take one row; `step` is among its keys."""
        ...

    def close(self) -> None:
        """Send the rows that are still buffered."""
        ...


class RunLog:
    """The log of one run, as a context manager. Only the active process shows or writes anything.

    log.jsonl holds one JSON object a line, with each step once: a resumed run first removes the
    rows after its checkpoint. The row of an evaluation has `val_loss` instead of `loss`.

    Raises:
        UserError: if the rows before the checkpoint are damaged.
        OSError: from any method, if the disk is full; the error names the file.
    """

    def __init__(
        self, out: Path, config: TrainConfig, *, done: int, active: bool, quiet: bool
    ) -> None:
        self.out = out
        self.config = config
        self.active = active
        self._path = out / "log.jsonl"
        self.rows = read_rows(self._path, done)
        self._done = done
        self._line_every = max(1, min(config.steps // 20, 100))
        self._console = Console(stderr=True)
        self._lines = active and not quiet and not self._console.is_terminal
        self._bar = _progress(self._console) if active and not quiet and not self._lines else None
        self._task: TaskID | None = None
        self._tracker: Tracker | None = None

    def __enter__(self) -> "RunLog":
        if self.active:
            with naming(self._path):
                write_whole(self._path, "".join(json.dumps(row) + "\n" for row in self.rows))
                self._file = self._path.open("a", encoding="utf-8", buffering=1)
            if self.config.track is not None:
                self._tracker = _open_tracker(self.config.track, self.config.name, self.out)
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(
                printable(self.config.name),
                total=self.config.steps,
                completed=self._done,
                loss="",
                speed="",
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with ExitStack() as stack:  # closes everything, even if closing one of them fails
            if self._tracker is not None:
                stack.callback(self._tracker.close)
            if self.active:
                stack.enter_context(naming(self._path))
                stack.callback(self._file.close)
            if self._bar is not None:
                stack.enter_context(if_read)
                stack.callback(self._bar.stop)

    def step(self, row: StepRow) -> None:
        """Write and show one step."""
        self._keep(row)
        loss, speed = f"{row['loss']:.4f}", _speed(row)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=row["step"], loss=loss, speed=speed)
        elif row["step"] % self._line_every == 0 or row["step"] == self.config.steps:
            left = self._time_left(row)
            self.note(f"step {row['step']}/{self.config.steps}: loss {loss}, {speed}{left}")

    def evaluation(self, step: int, found: Evaluation) -> None:
        """Write and show one evaluation, made after `step` steps."""
        self._keep(
            {
                "step": step,
                "val_loss": found.loss,
                "val_perplexity": found.perplexity,
                "val_bits_per_byte": found.bits_per_byte,
                "val_accuracy": found.accuracy,
                "val_exact_match": found.exact_match,
                "val_tokens": found.tokens,
                "time": time.time(),
            }
        )
        self.note(
            f"step {step}/{self.config.steps}: validation loss {found.loss:.4f}, "
            f"perplexity {found.perplexity:.3f}, accuracy {found.accuracy:.2%}"
        )

    def sync(self) -> None:
        """Flush the rows to disk, before a checkpoint is saved that relies on them."""
        if self.active:
            with naming(self._path):
                os.fsync(self._file.fileno())

    def _time_left(self, row: StepRow) -> str:
        steps = self.config.steps - row["step"]
        tokens = steps * self.config.batch_size * self.config.seq_len
        seconds = round(tokens / row["tokens_per_second"])
        return f", {timedelta(seconds=seconds)} left" if steps > 0 else ""

    def plot(self) -> None:
        """Draw loss.png, the losses by the tokens read, and write log.csv, all rows as a table."""
        if self.active:
            table = self.out / "log.csv"
            with naming(table):
                write_csv(self.rows, table)
            path = self.out / "loss.png"
            with naming(path):
                draw_losses(self.rows, path, self.config)

    def _keep(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))
        if self.active:
            with naming(self._path):
                self._file.write(json.dumps(row) + "\n")
        if self._tracker is not None:
            self._tracker.log(row)

    def note(self, text: str) -> None:
        """Show a message after the run's name."""
        line = printable(f"{self.config.name}: {text}")
        if self._bar is not None or self._lines:
            with if_read:
                show(line, self._console)
        elif self.active:
            logger.info(line)


def _speed(row: StepRow) -> str:
    words = [f"{row['tokens_per_second']:,.0f} tokens/s"]
    if "mfu" in row:
        words.append(f"{row['mfu']:.0%} MFU")
    if "peak_gb" in row:
        words.append(f"{row['peak_gb']:.1f} GB")
    return ", ".join(words)


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the rows of a log as a table with a column for each of their names."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    table = csv.DictWriter(text, names, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_whole(path, text.getvalue())


def draw_losses(rows: list[dict[str, Any]], path: Path, config: TrainConfig) -> None:
    """Draw the losses of a log by the tokens read, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    FigureCanvasAgg(figure)
    # Fixed margins: a layout that finds them draws the figure twice.
    axes = figure.add_axes((0.12, 0.13, 0.85, 0.78), xlabel="tokens", ylabel="loss (nats a token)")
    axes.set_title(printable(config.name), parse_math=False)
    per_step = config.batch_size * config.seq_len
    for key, label, style in (("loss", "training", "-"), ("val_loss", "validation", "o-")):
        points = [(row["step"] * per_step, row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=3, linewidth=1)
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
    path.unlink(missing_ok=True)
    with path.open("xb") as file:  # "x" creates a new file and never follows a link
        figure.savefig(file, format="png", dpi=150)


def read_rows(path: Path, done: int) -> list[dict[str, Any]]:
    """Read the rows of the first `done` steps of a log.jsonl; none if it is missing.

    These were on disk before the checkpoint. Later rows are not read: a resumed run removes them,
    and a kill may have cut the last one.

    Raises:
        UserError: if one of them is damaged.
    """
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MOST_ROW_BYTES):
            number += 1
            row = _parse_row(line)
            if row is None:
                is_cut = not line.endswith(b"\n") and len(line) < _MOST_ROW_BYTES
                if is_cut:
                    break
                raise UserError(
                    f"line {number} of {path} is no row of a log: mend it, or remove the file to "
                    f"go on without the rows of the first {done} steps"
                )
            if row["step"] > done:
                break
            rows.append(row)
    return rows


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    needed = {"val_loss", "val_perplexity"} if "val_loss" in row else StepRow.__required_keys__
    good = all(is_number(row.get(name)) for name in needed)
    good &= all(value is None or is_number(value) for value in row.values())
    return row if good and row.get("tokens_per_second", 1) > 0 else None


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
    )


class _TensorBoard:
    """Writes TensorBoard's format synchronously.

    TensorBoard's own writer works in a thread, where an error only prints a traceback.
    """

    def __init__(self, out: Path) -> None:
        self._event = import_library("tensorboard.compat.proto.event_pb2", "track").Event
        writer = import_library("tensorboard.summary.writer.record_writer", "track").RecordWriter
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = out / "tensorboard" / name
        with naming(self._path):
            self._path.parent.mkdir(exist_ok=True)
            self._file = self._path.open("xb")
        self._writer = writer(self._file)
        self._write(file_version="brain.Event:2")

    def log(self, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            if key not in ("step", "time") and value is not None:
                scalar = {"value": [{"tag": key, "simple_value": value}]}
                self._write(step=row["step"], summary=scalar)
        with naming(self._path):
            self._file.flush()

    def _write(self, **fields: Any) -> None:
        with naming(self._path):
            event = self._event(wall_time=time.time(), **fields)
            self._writer.write(event.SerializeToString())

    def close(self) -> None:
        with naming(self._path):
            self._file.close()


class _RunsElsewhere:
    """Sends rows to trackio or wandb, which have the same functions."""

    def __init__(self, name: str, project: str, out: Path) -> None:
        self._library = import_library(name, "track")
        self._library.init(project=project, name=out.name, resume="allow")

    def log(self, row: Mapping[str, Any]) -> None:
        values = {key: value for key, value in row.items() if key != "step" and value is not None}
        self._library.log(values, step=row["step"])

    def close(self) -> None:
        self._library.finish()


def _open_tracker(track: str, project: str, out: Path) -> Tracker:
    return _TensorBoard(out) if track == "tensorboard" else _RunsElsewhere(track, project, out)
