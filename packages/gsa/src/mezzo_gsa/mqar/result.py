"""The result of a sweep: a file of every run with its curve, the best of each, and a figure."""

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from mezzo_core.bench import environment
from mezzo_core.config_json import to_json
from mezzo_core.errors import UserError
from mezzo_core.papers.figures import draw_bars, draw_curves
from mezzo_core.papers.runs import write_result

from mezzo_gsa.mqar.config import RecallTraining, SweepConfig
from mezzo_gsa.mqar.model import MIXERS
from mezzo_gsa.mqar.training import Epoch, RecallRun

CLAIMS = ("gsa.claim.mqar",)
HOW_IT_IS_COMPUTED = frozenset({"compile", "graph"})
"""Fields of a training that change its speed and not what it learns: a sweep may change them."""
MISSING = "-"


class SweepResult:
    """The runs of a sweep, kept in a file, an experiment that `mezzo_core.papers` reads.

    That is `mqar.json`, or by what is not the protocol's `mqar_conv.json` (the first layer),
    `mqar_fan_in.json` (the weights' start) or `mqar_conv_fan_in.json`.
    """

    def __init__(self, training: RecallTraining, folder: Path, device: torch.device) -> None:
        """Read the runs that are there.

        Raises:
            UserError: if the file is none of these, or its runs trained in another way or on
                another machine.
        """
        self.training = training
        conv, fan_in = training.conv_width > 0, training.init == "fan_in"
        self.path = folder / f"mqar{'_conv' * conv}{'_fan_in' * fan_in}.json"
        self.runs: list[RecallRun] = []
        self._origin = environment(device)
        is_auto = training.precision == "auto"
        auto = "bf16" if device.type == "cuda" else "fp32"
        self._precision = auto if is_auto else training.precision
        if self.path.exists():
            self.runs = self._read()

    def find(self, model: str, width: int) -> list[RecallRun]:
        """Return the runs of a model at a width."""
        return [run for run in self.runs if (run.model, run.d_model) == (model, width)]

    def best(self) -> list[RecallRun]:
        """Return the most accurate run of each model and width, in order of both."""
        found: dict[tuple[str, int], RecallRun] = {}
        for run in self.runs:
            best = found.setdefault((run.model, run.d_model), run)
            if run.accuracy > best.accuracy:
                found[run.model, run.d_model] = run
        order = list(MIXERS)
        return sorted(found.values(), key=lambda run: (order.index(run.model), run.d_model))

    def left_out(self) -> list[str]:
        """Say in sentences what of the protocol was not done."""
        protocol = SweepConfig()
        return [
            *_differences(self.training, protocol.training),
            *(sentence for name in protocol.models for sentence in self._missing(name, protocol)),
            *(
                f"{run.model} C={run.d_model} lr {run.lr:g} was stopped after "
                f"{len(run.curve)} epochs by the limit of {self.training.seconds:g} s"
                for run in self.runs
                if run.stopped == "seconds"
            ),
        ]

    def add(self, run: RecallRun) -> None:
        """Keep a run: write the file and the figure again.

        Raises:
            UserError: if they cannot be written.
        """
        self.runs.append(run)
        write_result(self.path, self.to_json(), self._draw)

    def to_json(self) -> dict[str, Any]:
        """Return the experiment, with the training, all runs and what was left out."""
        left_out = self.left_out()
        widths = sorted({run.d_model for run in self.runs})
        return {
            "id": list(CLAIMS),
            "same_setting": not left_out,
            "setting": self._setting(),
            "columns": [f"C={width}" for width in widths],
            "unit": "accuracy",
            "better": "higher",
            "rows": [
                {"model": name, "seed": self.training.seed, "values": values}
                for name, values in self._accuracies(widths)
            ],
            **self._origin,
            "left_out": left_out,
            "training": _comparable(self.training),
            "runs": [asdict(run) for run in self.runs],
        }

    def _accuracies(self, widths: list[int]) -> Iterator[tuple[str, list[float | str]]]:
        found = {(run.model, run.d_model): run.accuracy for run in self.best()}
        for name in dict.fromkeys(name for name, _ in found):
            yield name, [found.get((name, width), MISSING) for width in widths]

    def _setting(self) -> str:
        training, task = self.training, self.training.task
        return (
            f"MQAR, T {task.seq_len}, {task.num_pairs} pairs, vocabulary {task.vocab_size}; "
            f"{self._layers()} of LayerNorm and mixer with one head (gsa: four; HGRN2: of "
            "width 128 at most), embedding tied, dropout 0.1 on it; "
            f"{training.train_rows:,} rows, batch {training.batch_size}, at most "
            f"{training.epochs} epochs, AdamW with decay 0.1, cosine by epoch to 0; "
            f"{training.test_rows:,} test rows, the best learning rate; {self._precision} "
            f"matrices{self._start()}. Unlike Zoology's models: no biases in projections, no "
            "dropout inside attention, no smaller start for output projections, no second "
            "normalized residual in place of the MLP"
        )

    def _layers(self) -> str:
        layers, width = self.training.num_layers, self.training.conv_width
        if not width:
            return f"{layers} layers"
        return f"a causal convolution of {width} tokens, then {layers - 1}"

    def _start(self) -> str:
        if self.training.init == "zoology":
            return ""
        return ", those of mixers started with a deviation of columns^-1/2"

    def _missing(self, name: str, protocol: SweepConfig) -> Iterator[str]:
        """Say at which of the protocol's widths and learning rates a model was not trained."""
        untrained = [width for width in protocol.widths if not self.find(name, width)]
        if untrained:
            yield f"{name} was not trained at C={', '.join(map(str, untrained))}"
        for width in protocol.widths:
            runs = self.find(name, width)
            tried = {run.lr for run in runs}
            missing = [f"{lr:g}" for lr in protocol.learning_rates if lr not in tried]
            if runs and missing:
                solved = any(run.stopped == "solved" for run in runs)
                reason = " (another solved the task)" if solved else ""
                yield f"{name} C={width} was not trained with lr {', '.join(missing)}{reason}"

    def _draw(self, figure: Path) -> None:
        best = self.best()
        if len({run.d_model for run in best}) == 1:  # a curve of one point is nothing to see
            draw_bars({run.model: [run.accuracy] for run in best}, figure, ylabel="accuracy")
            return
        curves: dict[str, list[tuple[float, float]]] = {}
        for run in best:
            curves.setdefault(run.model, []).append((run.d_model, run.accuracy))
        draw_curves(curves, figure, xlabel="model width C", ylabel="accuracy")

    def _read(self) -> list[RecallRun]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            found, machine = content["training"], content["gpu"]
            runs = [_run(entry) for entry in content["runs"]]
        except (KeyError, TypeError, OSError, json.JSONDecodeError) as error:
            raise UserError(f"{self.path}: no result of an MQAR sweep: {error!r}") from error
        wanted = _comparable(self.training)
        if found != wanted:
            names = [name for name in wanted if found.get(name) != wanted[name]]
            raise UserError(
                f"{self.path} holds runs with another {', '.join(names)}: choose another folder"
            )
        if machine != self._origin["gpu"]:
            ours = self._origin["gpu"] or "a CPU"
            raise UserError(f"{self.path} was measured on {machine or 'a CPU'}, this is {ours}")
        return runs


def _run(entry: dict[str, Any]) -> RecallRun:
    return RecallRun(**{**entry, "curve": tuple(Epoch(**epoch) for epoch in entry["curve"])})


def _comparable(training: RecallTraining) -> dict[str, Any]:
    return {k: v for k, v in to_json(training).items() if k not in HOW_IT_IS_COMPUTED}


def _differences(training: RecallTraining, protocol: RecallTraining) -> Iterator[str]:
    """Say what a training does not share with the protocol's."""
    for name in ("seq_len", "num_pairs", "vocab_size", "power"):
        ours, theirs = getattr(training.task, name), getattr(protocol.task, name)
        if ours != theirs:
            yield f"{name} is {ours}, the protocol's {theirs}"
    if training.train_pairs:
        shares = ", ".join(map(str, training.train_pairs))
        pairs = protocol.task.num_pairs
        yield f"rows to train on have {shares} pairs, in equal shares, the protocol's {pairs}"
    for field in fields(training):
        if field.name in {"task", "train_pairs", "seconds", "precision", *HOW_IT_IS_COMPUTED}:
            continue
        ours, theirs = getattr(training, field.name), getattr(protocol, field.name)
        if ours != theirs:
            pair = (f"{x:,}" if isinstance(x, int) else x for x in (ours, theirs))
            yield "{} is {}, the protocol's {}".format(field.name, *pair)
