"""Train the six architectures of the main comparison on the same tokens on one GPU.

    python packages/rat/benchmarks/train_six.py bpe --data books.jsonl.xz --tokenizer gpt2/ \
        --out packages/rat/results/nvidia-h200
    python packages/rat/benchmarks/train_six.py bytes --data books.jsonl.xz \
        --out packages/rat/results/nvidia-h200

Writes train_six_NAME.json (an experiment, see mezzo_core.papers.results, with every loss curve) and
train_six_NAME.png after each run. Earlier rows of other models or seeds stay in the file.
"""

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib
import torch
from mezzo_core.bench import environment
from mezzo_core.data import DataConfig
from mezzo_core.papers.runs import write_result
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.loop import train
from mezzo_rat.recipes import PAPER_NAMES, mid, small, tiny, train_config
from rich.console import Console

matplotlib.use("Agg")
from matplotlib import pyplot as plt

EXPERIMENTS = {
    # GPT-2 tokens at T 1024, five passes over six novels, Shakespeare and the addresses.
    "bpe": replace(mid(), steps=375, eval_every=75, checkpoint_every=10**9),
    # Bytes at the paper's T and window: five passes over the same text.
    "bytes": replace(
        small(),
        vocab_size=257,
        seq_len=4096,
        window_size=1024,
        batch_size=16,
        micro_batch_size=16,
        steps=1500,
        eval_every=250,
        checkpoint_every=10**9,
    ),
    # A rehearsal on a CPU.
    "dry": replace(tiny(), steps=2, eval_every=1),
}
CLAIMS = ["rat.claim.ppl_between", "rat.claim.ppl_200m", "rat.table1"]


def main() -> None:
    """Train what `--names` lists, one seed after another."""
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = arguments.out / f"train_six_{arguments.experiment}.json"
    rows, runs = [], []
    if report.exists():
        old = json.loads(report.read_text())
        rows, runs = old["rows"], old["runs"]
    for seed in arguments.seeds:
        for name in arguments.names:
            config = configure(name, seed, arguments)
            row, run = measure(name, config, arguments)
            rows = [r for r in rows if (r["model"], r["seed"]) != (row["model"], seed)] + [row]
            runs = [r for r in runs if (r["model"], r["seed"]) != (row["model"], seed)] + [run]
            Console().print(row, {k: v for k, v in run.items() if k not in ("train", "val")})
            content = {
                "id": CLAIMS,
                "same_setting": False,
                "setting": setting_words(config, arguments),
                "columns": ["Val. PPL"],
                "unit": "perplexity",
                "better": "lower",
                "rows": rows,
                **environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
                "runs": runs,
            }
            write_result(report, content, partial(draw, runs))


def configure(name: str, seed: int, arguments: argparse.Namespace) -> TrainConfig:
    """Return the run of one architecture of this experiment, on the given data."""
    data = DataConfig(source=str(arguments.data), tokenizer=str(arguments.tokenizer))
    cuda = torch.cuda.is_available()
    hyperparameters = replace(EXPERIMENTS[arguments.experiment], data=data, compile=cuda)
    config = train_config(f"{arguments.experiment}_{name}", hyperparameters, name)
    return replace(config, seed=seed)


def measure(name: str, config: TrainConfig, arguments: argparse.Namespace) -> tuple[dict, dict]:
    """Train once; return the row of the result, and further results of the run."""
    model = PAPER_NAMES[name]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    folder = arguments.runs / f"{config.name}-{config.seed}"
    result = train(config, folder, resume=False, quiet=True)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [(row["step"], round(row["loss"], 4)) for row in log if "loss" in row]
    with torch.device("meta"):
        parameters = config.model.build().num_parameters()
    cuda = torch.cuda.is_available()
    row = {"model": model, "seed": config.seed, "values": [round(result.val_perplexity, 3)]}
    run = {
        "model": model,
        "seed": config.seed,
        "parameters": parameters,
        "tokens_per_second": round(result.tokens_per_second),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if cuda else None,
        "train": steps[:: max(1, len(steps) // 100)],
        "val": [(row["step"], round(row["val_loss"], 4)) for row in log if "val_loss" in row],
    }
    return row, run


def setting_words(config: TrainConfig, arguments: argparse.Namespace) -> str:
    """Return a description of the conditions that all runs share."""
    tokens = config.steps * config.batch_size * config.seq_len
    return (
        f"C {config.model.d_model}, {len(config.model.mixers)} layers, T {config.seq_len}, "
        f"{config.steps} steps of {config.batch_size} sequences ({tokens:,} tokens of "
        f"{arguments.data.name}, tokenizer {arguments.tokenizer.name}), lr {config.optim.lr:g}, "
        f"warm-up {config.optim.warmup_fraction:.0%} of the steps, bf16 autocast, "
        f"torch.compile {'on' if config.compile else 'off'}"
    )


def draw(runs: list[dict], path: Path) -> None:
    """Plot the validation losses of the first seed of each model."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for model in PAPER_NAMES.values():
        curves = [run["val"] for run in runs if run["model"] == model]
        if curves:
            axes.plot(*zip(*curves[0], strict=True), marker=".", label=model)
    axes.set(xlabel="step", ylabel="validation loss (nats a token)")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("byte"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--runs", type=Path, default=Path("runs/train_six"))
    parser.add_argument("--names", nargs="+", choices=PAPER_NAMES, default=list(PAPER_NAMES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    return parser.parse_args()


if __name__ == "__main__":
    main()
