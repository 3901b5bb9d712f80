"""Train the six architectures of the main comparison on the same tokens on one GPU.

    python packages/rat/benchmarks/train_six.py --data books.jsonl.xz --tokenizer gpt2/ \
        --steps 375 --out packages/rat/results/nvidia-h200

Writes train_six.json (an experiment, see mezzo_core.papers.results, with every loss curve) and
train_six.png after each run; rows of other models or seeds that are already there stay.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import matplotlib
import torch
from mezzo_core.bench import environment
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.loop import train
from mezzo_rat.recipes import RECIPES
from rich.console import Console

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ARCHITECTURES = {
    "rnn": "RNN",
    "rat_l64": "RAT(L=64)",
    "rat_l16": "RAT(L=16)",
    "attention": "Attention",
    "attention_swa": "Attention-SWA",
    "rat_swa": "RAT(L=16)-SWA",
}
CLAIMS = ["rat.claim.ppl_between", "rat.claim.ppl_200m", "rat.table1"]


def main() -> None:
    """Train what `--names` lists, one seed after another."""
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = arguments.out / "train_six.json"
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
                "setting": setting(config, arguments),
                "columns": ["Val. PPL"],
                "unit": "perplexity",
                "better": "lower",
                "rows": rows,
                **environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
                "runs": runs,
            }
            report.write_text(json.dumps(content, indent=1) + "\n")
            draw(runs, arguments.out / "train_six.png")


def configure(name: str, seed: int, arguments: argparse.Namespace) -> TrainConfig:
    """Return the recipe with the data and the budget of this experiment."""
    config = RECIPES[f"{arguments.size}_{name}"]()
    tokenizer = str(arguments.tokenizer or config.data.tokenizer)
    return replace(
        config,
        data=replace(config.data, source=str(arguments.data), tokenizer=tokenizer),
        steps=arguments.steps or config.steps,
        eval_every=arguments.eval_every,
        checkpoint_every=10**9,
        seed=seed,
        compile=torch.cuda.is_available(),
    )


def measure(name: str, config: TrainConfig, arguments: argparse.Namespace) -> tuple[dict, dict]:
    """Train once; return the row of the result and what else the run showed."""
    model = ARCHITECTURES[name]
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


def setting(config: TrainConfig, arguments: argparse.Namespace) -> str:
    """Say in words what all runs share."""
    tokens = config.steps * config.batch_size * config.seq_len
    tokenizer = arguments.tokenizer.name if arguments.tokenizer else config.data.tokenizer
    return (
        f"C {config.model.d_model}, {len(config.model.mixers)} layers, T {config.seq_len}, "
        f"{config.steps} steps of {config.batch_size} sequences ({tokens:,} tokens of "
        f"{arguments.data.name}, {tokenizer} tokens), lr {config.optim.lr:g}, bf16 autocast, "
        f"torch.compile {'on' if config.compile else 'off'}"
    )


def draw(runs: list[dict], path: Path) -> None:
    """Plot the validation losses of the first seed of each model."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for model in ARCHITECTURES.values():
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
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="default: the recipe's")
    parser.add_argument("--out", type=Path, required=True, help="folder of train_six.json")
    parser.add_argument("--runs", type=Path, default=Path("runs/train_six"))
    parser.add_argument("--size", default="mid", help="the recipes' prefix")
    parser.add_argument("--names", nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--eval-every", type=int, default=50)
    return parser.parse_args()


if __name__ == "__main__":
    main()
