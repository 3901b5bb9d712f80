"""Trains models and measures how well and how fast: the jobs of trainings, and sweeps of rates."""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mezzo_core.data import DataConfig
from mezzo_core.data.find import find_files
from mezzo_core.data.hub import HUB_PREFIX
from mezzo_core.data.tokenized_corpus import token_store
from mezzo_core.errors import UserError
from mezzo_core.eval.evaluate import evaluate
from mezzo_core.files import read_json, write_whole
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.nn.lm import LM
from mezzo_core.nn.on_meta import on_meta
from mezzo_core.nn.stack import Stack
from mezzo_core.reproduction.origin import origin
from mezzo_core.reproduction.result_file import DIVERGED, Cell, Entry, Result, say
from mezzo_core.reproduction.runner import SPEED, Job, run
from mezzo_core.reproduction.timing import peak_gb, start_afresh
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.folder import check_folder
from mezzo_core.train.log import read_rows
from mezzo_core.train.loop import DivergenceError, train
from mezzo_core.train.meter import StepRow

WARMUP = 10
"""Steps left out of the speed: on a GPU, those before the training loop first reads the clock."""
POINTS = 100  # at most, of a stored curve
SWEPT = 0
"""The seed with which learning rates are compared."""
Measure = Callable[[TrainConfig, dict[str, Any], Path, torch.device], Mapping[str, float]]
"""Takes a run, what `measure_run` gives, its folder and the device; returns a value a column."""


def training(
    model: str,
    columns: Sequence[str],
    config: TrainConfig,
    measure: Measure | None = None,
    kept: Path | None = None,
) -> Job:
    """Return the job that trains a model, and gives its row the value of each column.

    A column that `measure` leaves out has the validation perplexity. The details of the run stand
    in the first column. The run uses the scratch folder, or the folder `kept`, which stays.
    """
    cells = tuple(Cell(model, column, seed=config.seed) for column in columns)
    return Job(cells, partial(_train, config, measure, kept))


def trainings(
    configs: Mapping[str, TrainConfig],
    columns: Sequence[str],
    seeds: Sequence[int],
    measure: Measure | None = None,
) -> Iterator[Job]:
    """Yield the jobs of all models with each seed, the first seed first."""
    for seed in seeds:
        for model, config in configs.items():
            yield training(model, columns, replace(config, seed=seed), measure)


def _train(
    config: TrainConfig,
    measure: Measure | None,
    kept: Path | None,
    cells: tuple[Cell, ...],
    folder: Path,
    device: torch.device,
) -> Iterator[list[Entry]]:
    folder = kept or folder
    try:
        found = measure_run(config, folder, device)
    except DivergenceError:
        yield [cell.entry(DIVERGED) for cell in cells]
        return
    values = measure(config, found, folder, device) if measure else {}
    perplexity = found.pop("perplexity")
    yield [
        cell.entry(values.get(cell.column, perplexity), **({} if i else found))
        for i, cell in enumerate(cells)
    ]


def of_model(
    test: Callable[[LM, TrainConfig], Mapping[str, float]],
    config: TrainConfig,
    found: dict[str, Any],
    folder: Path,
    device: torch.device,
) -> Mapping[str, float]:
    """Test the trained model; `partial(of_model, test)` is a `Measure`."""
    model, _, _ = load_model(folder / "model", device=device)
    return test(model, config)


def loss_by_length(
    model: LM, config: TrainConfig, *, lengths: Mapping[str, int], windows: int | None = None
) -> dict[str, float]:
    """Return the loss on the validation part in windows of each length T, in nats a token.

    The lengths have the names of columns. If they divide the longest, all have the same targets:
    those in the first `windows` windows of the longest length (None: in all).
    """
    longest, found = max(lengths.values(), default=0), {}
    for column, T in lengths.items():
        text = config.data.build(T, token_store())
        batches = islice(text.validation_batches(longest // T), windows)
        found[column] = evaluate(model, batches, precision=config.precision).loss
    return found


def sweep(
    result: Result,
    configs: Mapping[str, TrainConfig],
    rates: Mapping[str, float],
    seeds: Sequence[int],
    *where: Any,
) -> None:
    """Train each model at several learning rates with seed SWEPT, with the other seeds at its best.

    So no model loses by a rate that does not suit it. The sweep begins with the three rates in the
    middle, and goes on while a model's best rate has an untried neighbour.
    `mezzo_core.reproduction.measurement.at_best` reads such a result, whose columns are the names
    of the rates. The seed and the rate of the configurations are replaced. `where` are the last
    arguments of `run`.
    """
    columns = list(rates)

    def train_all(wanted: Sequence[tuple[str, str, int]]) -> None:
        jobs = [
            training(model, [rate], replace(at_rate(configs[model], rates[rate]), seed=seed))
            for model, rate, seed in wanted
        ]
        run(result, jobs, *where)

    def around_best(model: str) -> list[str]:
        if (best := result.best_column(model, seed=SWEPT)) is None:
            return []
        place = columns.index(best)
        return columns[max(0, place - 1) : place + 2]

    middle = columns[max(0, len(columns) - 3) // 2 :][:3]
    wanted = [(model, rate, SWEPT) for rate in middle for model in configs]
    while wanted:
        train_all(wanted)
        near = [(model, rate, SWEPT) for model in configs for rate in around_best(model)]
        wanted = [(m, rate, s) for m, rate, s in near if not result.has(Cell(m, rate, seed=s))]
    best = {model: result.best_column(model, seed=SWEPT) for model in configs}
    others = [seed for seed in seeds if seed != SWEPT]
    train_all([(model, rate, seed) for seed in others for model, rate in best.items() if rate])


def at_rate(config: TrainConfig, lr: float) -> TrainConfig:
    """Return a run at another learning rate, with the final rate in the same proportion to it."""
    optim = config.optim
    return replace(config, optim=replace(optim, lr=lr, min_lr=optim.min_lr / optim.lr * lr))


@dataclass(frozen=True)
class Tuning:
    """The work of a job that trains one model with several optimizers, and tells the best run.

    Each of the cells gets one of the measures `by`. The first has the run's details too, and in
    "others" those of the other runs, the best first. A run has a folder of its own, so that a
    killed one resumes, and a finished one is only read.
    """

    name: str  # of what is trained, for what is said
    cells: tuple[Cell, ...]
    configs: Sequence[TrainConfig]  # the runs, in the order in which they are made
    folder: Path  # what the runs' folders begin with; their settings follow, as in "gsa_lr0.001"
    swept: Sequence[str] = ("lr",)  # the fields of `OptimConfig` in which the runs differ
    by: Sequence[str] = ("accuracy",)
    """Higher is better, and the second decides between runs that are equal by the first. A run
    whose loss exploded has DIVERGED in their place."""
    enough: float | None = None  # stop once the first measure of a run exceeds this
    details: Mapping[str, Any] = field(default_factory=dict)  # further ones

    def __call__(
        self, missing: tuple[Cell, ...], _: Path, device: torch.device
    ) -> Iterator[list[Entry]]:
        """Train, and yield what is missing of the cells."""
        runs: list[dict[str, Any]] = []
        for config in self.configs:
            runs.append(self._train(config, device))
            if self.enough is not None and self._scores(runs[-1])[0] > self.enough:
                break
        best, *others = sorted(runs, key=self._scores, reverse=True)
        values = dict(zip(self.cells, [best.pop(measure) for measure in self.by], strict=True))
        told = {**self.details, **best, "others": others or None}
        yield [c.entry(values[c], **(told if c == self.cells[0] else {})) for c in missing]

    def _train(self, config: TrainConfig, device: torch.device) -> dict[str, Any]:
        settings = {name: getattr(config.optim, name) for name in self.swept}
        words = [f"{name}{value:g}" for name, value in settings.items()]
        own = self.folder.with_name("_".join([self.folder.name, *words]))
        try:
            found = measure_run(config, own, device, resume=True)
            found = {k: part for k, part in found.items() if k not in ("perplexity", SPEED)}
        except DivergenceError:
            found = dict.fromkeys(self.by, DIVERGED)
        measures = ", ".join(str(found[measure]) for measure in self.by)
        say(f"{self.name} {' '.join(words)}: {measures}")
        return settings | found

    def _scores(self, found: Mapping[str, Any]) -> list[float]:
        return [-1.0 if found[measure] == DIVERGED else found[measure] for measure in self.by]


def measure_run(
    config: TrainConfig, folder: Path, device: torch.device, *, resume: bool = False
) -> dict[str, Any]:
    """Train a model and return what came of it, read from the run's log.

    If it starts from another model (`init_from`), that is evaluated too. With `resume` the run in
    the folder goes on, or is only read if it is done; without, it is removed.

    Returns:
        perplexity, accuracy and (of a task) exact_match on the validation part, parameters,
        tokens_per_second (median after the warm-up), peak_gb (None on a CPU, or if the run was
        only read), and steps: the curves "train" and "val", lists of [step, loss] with at most
        POINTS points.

    Raises:
        DivergenceError: if the loss explodes.
        UserError: if the run in the folder was made at another commit or on another machine, or the
            log of a run that is only read is gone, damaged or cut off.
        torch.OutOfMemoryError: if the run does not fit into the GPU.
    """
    check_folder(folder, config, resume=resume, may_move=True)  # before anything is written there
    _keep_origin(folder, device, resume=resume)
    start = [] if config.init_from is None else [[0, _loss_before(config, device)]]
    start_afresh()
    taken: list[StepRow] = []
    done = train(config, folder, resume=resume, quiet=True, device=device, on_step=taken.append)
    peak = peak_gb(device) if taken else None
    log = read_rows(folder / "log.jsonl", done.steps)
    steps = [row for row in log if "loss" in row]
    tests = [row for row in log if "val_loss" in row]
    measures = ["val_accuracy"]
    if not isinstance(config.data, DataConfig):  # no model predicts whole rows of text
        measures.append("val_exact_match")
    last = [rows[-1] for rows in (steps, tests) if rows and rows[-1]["step"] == done.steps]
    if len(last) < 2 or any(last[1].get(measure) is None for measure in measures):
        raise UserError(
            f"{folder / 'log.jsonl'} lacks the last step of its run or what was measured after it: "
            f"remove {folder}, and the run is made again"
        )
    speeds = [row["tokens_per_second"] for row in steps]
    return {
        "perplexity": tests[-1]["val_perplexity"],
        "accuracy": tests[-1]["val_accuracy"],
        "exact_match": tests[-1]["val_exact_match"] if len(measures) > 1 else None,
        "parameters": on_meta(config.model).num_parameters(),
        "tokens_per_second": round(statistics.median(speeds[WARMUP:] or speeds[-1:])),
        "peak_gb": peak,
        "steps": {
            "train": _thinned([[row["step"], row["loss"]] for row in steps]),
            "val": _thinned(start + [[row["step"], row["val_loss"]] for row in tests]),
        },
    }


def _keep_origin(folder: Path, device: torch.device, *, resume: bool) -> None:
    """Keep beside a run where it is made, and refuse to go on with one that was made elsewhere.

    Else a new result file would name this commit and machine for what others made.
    """
    path, here = folder / "origin.json", origin(device)
    ours = {name: here[name] for name in ("commit", "gpu", "torch", "triton", "mezzo_core")}
    if resume and (folder / "config.json").exists():
        found = read_json(path) if path.exists() else {}
        for name, value in ours.items():
            if found.get(name) != value:
                raise UserError(
                    f"the run in {folder} has another {name} ({found.get(name)!r}, not {value!r}): "
                    "remove it, or write elsewhere"
                )
    with suppress(OSError):  # the run will say that it cannot write there
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(ours))


def in_words(config: TrainConfig, device: torch.device) -> str:
    """Describe a run: the model's width and depth, tokens, learning rate and precision."""
    stack, data, optim = on_meta(config.model).stack, config.data, config.optim
    layers = f", {len(stack.blocks)} layers" if isinstance(stack, Stack) else ""
    assert isinstance(data, DataConfig)
    tokens = config.steps * config.batch_size * config.seq_len
    return (
        f"C {config.model.d_model}{layers}, "
        f"T {config.seq_len}, {config.steps} steps of {config.batch_size} sequences "
        f"({tokens:,} tokens of {corpus_name(data.source)}, "
        f"tokenizer {Path(data.tokenizer).name}), lr {optim.lr:g}, warm-up "
        f"{optim.warmup_fraction:.0%} of the steps, {'bf16' if device.type == 'cuda' else 'fp32'}, "
        f"torch.compile {'on' if config.compile else 'off'}"
    )


def corpus_name(source: str) -> str:
    """Return the names of a corpus's files, or its own name if it has none."""
    if source == "embedded" or source.startswith(HUB_PREFIX):
        return source
    return ", ".join(path.name for path in find_files(source))


def _loss_before(config: TrainConfig, device: torch.device) -> float:
    """Return the validation loss of the model from which a run starts."""
    model, _, _ = load_model(Path(str(config.init_from)), device=device)
    data = config.data.build(config.seq_len, token_store())
    batches = islice(data.validation_batches(config.batch_size), config.eval_batches)
    return evaluate(model, batches, precision=config.precision).loss


def _thinned(points: list[list[float]]) -> list[list[float]]:
    """Keep at most POINTS points at equal distances, the last one among them."""
    return points[::-1][:: math.ceil(len(points) / POINTS) or 1][::-1]
