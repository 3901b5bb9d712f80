"""Train the paper's 200M recipes on one GPU, for a few steps: speed, memory and loss.

    python packages/rat/benchmarks/train_200m.py --data books.jsonl.xz --tokenizer gpt2/ \
        --out packages/rat/results/nvidia-h200
    python packages/rat/benchmarks/train_200m.py --dry-run --out DIR      # toy sizes, on a CPU

Width, depth, T and optimizer are the recipes'. A step has 131,072 tokens instead of 1,048,576, that
is an eighth of the micro-batches. Writes train_200m.json (an experiment, see
mezzo_core.papers.results, with each step's loss and speed) and train_200m.png after each model.
Results of other models stay.
"""

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from mezzo_core.bench import environment
from mezzo_core.errors import UserError, nearest
from mezzo_core.papers.runs import read_runs, write_result
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.loop import train
from mezzo_rat.recipes import PAPER_NAMES, Hyperparameters, paper_200m, train_config
from rich.console import Console

MODELS = ("rnn", "rat_l64", "rat_l16", "attention")
RECIPE = paper_200m(8192)
WARMUP = 10
"""Steps left out of the speed: on a GPU, those before the training loop first reads the clock."""
PEAK_FLOPS = {"NVIDIA H200": 989e12}
"""Dense bf16 FLOP/s in the GPU's data sheet."""
CLAIM = "rat.claim.train_time_200m"
COLUMNS = {
    "Hours on one GPU for 15B tokens": "hours",
    "% of bf16 peak": "percent_of_peak",
    "s to the first step": "seconds_to_first_step",
    "Train. loss": "train_loss",
    "Val. PPL": "val_perplexity",
}
"""Columns that a README shows beside weights, tokens/s and memory, with their keys in a run."""


def main(words: list[str] | None = None) -> int:
    """Train what the command line selects; return 0, or 2 when the user can mend a mistake."""
    try:
        run(parse(words), Console())
    except UserError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    return 0


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Train the models one after another, and write the result after each."""
    unknown = [name for name in arguments.models if name not in MODELS]
    if unknown:
        raise UserError(f"no model is named {unknown[0]!r}{nearest(unknown[0], MODELS)}")
    if arguments.steps <= WARMUP:
        raise UserError(
            f"--steps must be above {WARMUP}, which warm up and are not timed, "
            f"got {arguments.steps}"
        )
    if not (arguments.dry_run or torch.cuda.is_available()):
        raise UserError("the 200M recipes need a CUDA GPU: --dry-run rehearses on a CPU")
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    origin = environment(device)
    origin["commit"] = arguments.commit or origin["commit"]
    configs = {name: configure(name, arguments) for name in arguments.models}
    origin["setting"] = setting_words(next(iter(configs.values())), arguments)
    report = arguments.out / "train_200m.json"
    runs = {model: run for (model, _), run in read_runs(report, origin).items()}
    for name, config in configs.items():
        model = PAPER_NAMES[name]
        runs[model] = {
            "model": model,
            "seed": config.seed,
            **measure(config, arguments.runs, device, PEAK_FLOPS.get(origin["gpu"])),
            "commit": origin["commit"],
            "date": origin["date"],
        }
        write(report, origin, runs)
        console.print(summary(runs[model]), markup=False, highlight=False, soft_wrap=True)


def configure(name: str, arguments: argparse.Namespace) -> TrainConfig:
    """Return the recipe 200m_NAME with the changes for a short run; a dry run has toy size."""
    paper = toy(RECIPE) if arguments.dry_run else RECIPE
    source, tokenizer = arguments.data, arguments.tokenizer
    data = replace(
        paper.data, source=source or paper.data.source, tokenizer=tokenizer or paper.data.tokenizer
    )
    short = replace(
        paper,
        data=data,
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        micro_batch_size=arguments.micro_batch_size,
        eval_every=arguments.steps,
        eval_batches=None,
        checkpoint_every=arguments.steps,
    )
    return train_config(f"200m_{name}", short, name)


def toy(paper: Hyperparameters) -> Hyperparameters:
    """Return hyperparameters of the same form that a CPU trains in seconds."""
    return replace(
        paper,
        vocab_size=257,
        d_model=32,
        num_layers=2,
        head_dim=8,
        seq_len=128,
        data=replace(paper.data, source="embedded", tokenizer="byte"),
        compile=False,
    )


def measure(
    config: TrainConfig, folder: Path, device: torch.device, peak_flops: float | None
) -> dict[str, Any]:
    """Train once; return the run's results.

    All models train in the same folder in turn, so that the text is tokenized once.
    """
    # Each model is compiled anew, and memory that an earlier one left does not count for this one.
    torch.compiler.reset()
    gc.collect()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        result = train(config, folder, resume=False, device=device)
    except torch.OutOfMemoryError:
        raise UserError(
            f"{config.name} does not fit the GPU with micro-batches of {config.micro_batch_size} "
            "sequences: give a smaller --micro-batch-size"
        ) from None
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [row for row in log if "loss" in row]
    per_step = config.batch_size * config.seq_len
    speed, first = steady_and_first([row["tokens_per_second"] for row in steps], per_step)
    with torch.device("meta"):
        model = config.model.build()
    flops = 3 * model.flops_per_token(config.seq_len) * speed
    recipe_tokens = RECIPE.steps * RECIPE.batch_size * RECIPE.seq_len
    return {
        "parameters": model.num_parameters(),
        "tokens_per_second": round(speed),
        "hours": round(recipe_tokens / speed / 3600, 2),
        "percent_of_peak": round(100 * flops / peak_flops, 1) if peak_flops else None,
        "seconds_to_first_step": round(first, 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if cuda else None,
        "train_loss": round(result.final_loss, 3),
        "val_perplexity": round(result.val_perplexity, 1),
        "steps": [
            (row["tokens"], round(row["loss"], 4), round(row["tokens_per_second"])) for row in steps
        ],
    }


def steady_and_first(speeds: Sequence[float], tokens_per_step: int) -> tuple[float, float]:
    """Return the tokens a second after the warm-up, and the seconds until the first step ended.

    The loop reads a GPU's clock only every few steps. So the time of the first step (compiling,
    first allocations) is that of the first WARMUP steps minus WARMUP - 1 steps at steady speed.

    Args:
        speeds: tokens a second of each step, more than WARMUP.
        tokens_per_step: of the whole batch.
    """
    steady = statistics.median(speeds[WARMUP:])
    warming = sum(tokens_per_step / speed for speed in speeds[:WARMUP])
    return steady, warming - (WARMUP - 1) * tokens_per_step / steady


def setting_words(config: TrainConfig, arguments: argparse.Namespace) -> str:
    """Return a description of the conditions that all runs share."""
    per_step = config.batch_size * config.seq_len
    precision = "a rehearsal at toy size, fp32" if arguments.dry_run else "bf16 autocast"
    return (
        f"the 200M recipes for {config.steps} steps: C {config.model.d_model}, "
        f"{len(config.model.mixers)} layers, T {config.seq_len}, {per_step:,} tokens a step "
        f"in micro-batches of {config.micro_batch_size * config.seq_len:,} "
        f"({config.steps * per_step:,} tokens of {Path(config.data.source).name}, tokenizer "
        f"{Path(config.data.tokenizer).name}), warm-up {config.optim.warmup_fraction:.0%} of the "
        f"steps, {precision}, torch.compile {'on' if config.compile else 'off'}; speed: median "
        f"after {WARMUP} steps; peak: the data sheet's, at 3 times the forward's FLOPs"
    )


def write(path: Path, origin: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the experiment and its figure, the models in the order of MODELS."""
    runs = [found[model] for model in map(PAPER_NAMES.__getitem__, MODELS) if model in found]
    content = {
        "id": [CLAIM],
        "same_setting": False,
        "columns": list(COLUMNS),
        "unit": "",
        "better": "lower",
        "rows": [
            {
                "model": run["model"],
                "seed": run["seed"],
                "values": ["-" if run[key] is None else run[key] for key in COLUMNS.values()],
            }
            for run in runs
        ],
        **origin,
        "runs": runs,
    }
    write_result(path, content, partial(draw, runs))


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the training loss, and the speed after the warm-up, over the tokens read."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    losses, speeds = figure.subplots(1, 2)
    for run in runs:
        tokens, loss, speed = zip(*run["steps"], strict=True)
        losses.plot(tokens, loss, label=run["model"], linewidth=1.4)
        speeds.plot(tokens[WARMUP:], speed[WARMUP:], label=run["model"], linewidth=1.4)
    losses.set(xlabel="tokens", ylabel="training loss (nats a token)")
    speeds.set(xlabel="tokens", ylabel="tokens/s")
    speeds.set_ylim(bottom=0)
    losses.legend(frameon=False)
    for axes in (losses, speeds):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)


def summary(run: Mapping[str, Any]) -> str:
    """Return a run's results in one line."""
    share = "" if run["percent_of_peak"] is None else f", {run['percent_of_peak']} % of peak"
    memory = "" if run["peak_gb"] is None else f", {run['peak_gb']} GB"
    return (
        f"{run['model']}: {run['tokens_per_second']:,} tokens/s{share}{memory}, "
        f"{run['seconds_to_first_step']} s to the first step, training loss {run['train_loss']}, "
        f"validation perplexity {run['val_perplexity']}"
    )


def parse(words: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--data", help="a corpus; the recipe's own by default")
    parser.add_argument("--tokenizer", help="the recipe's own by default")
    parser.add_argument("--runs", type=Path, default=Path("runs/train_200m"), help="scratch")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences a step")
    parser.add_argument(
        "--micro-batch-size", type=int, default=RECIPE.micro_batch_size, help="sequences at a time"
    )
    parser.add_argument("--commit", help="of the code, where no checkout tells it")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on a CPU")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
