"""Train Table 2's rows and two more at a small size, all on the same tokens, on one GPU.

    python packages/gsa/benchmarks/ablation.py --data 'texts/*.jsonl.xz' --tokenizer gpt2/ \
        --out packages/gsa/results/nvidia-h200
    python packages/gsa/benchmarks/ablation.py --data ... --out DIR --rows gsa abc --seeds 0 1
    python packages/gsa/benchmarks/ablation.py --dry-run --out DIR        # toy size, on a CPU

The paper trains 340M weights on 10B tokens; these are 34M weights and 26M tokens. The two further
rows are attention, and GSA whose slots start with memories of 2 to 2048 tokens
(`GSAConfig.gate_spans`), as constant gates always do. Writes ablation.json (an experiment, see
mezzo_core.papers.results, with every loss curve) and ablation.png after each run. Earlier rows of
other models or seeds stay in the file.
"""

import argparse
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mezzo_gsa
import torch
from matplotlib.figure import Figure
from mezzo_core.bench import environment
from mezzo_core.data import DataConfig
from mezzo_core.errors import UserError, nearest
from mezzo_core.papers import compare_order, load_published
from mezzo_core.papers.runs import read_runs, write_result
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_core.train.loop import train
from mezzo_gsa.recipes import ABLATION, PAPER_NAMES, Hyperparameters, tiny, train_config
from rich.console import Console

TABLE = load_published(Path(mezzo_gsa.__file__).parent / "published.toml").table("gsa.table2")
CLAIMS = [
    "gsa.table2",
    "gsa.claim.ablation_gating",
    "gsa.claim.ablation_softmax",
    "gsa.claim.ablation_slots",
]
REFERENCE = "reference"
"""The group of the first row, of which all others are variants."""
SPREAD = "GSA, slots started apart"
NAMES = {**ABLATION, "gsa_spread": SPREAD, "attention": PAPER_NAMES["attention"]}
"""The paper's name for each row, by the recipe's; two rows are not in the paper."""
PAPER_GROUPS = {row.model: row.group for row in TABLE.rows}
GROUPS = {**PAPER_GROUPS, SPREAD: "ours", PAPER_NAMES["attention"]: "attention"}
SMALL = Hyperparameters(
    vocab_size=50_257,
    d_model=384,
    num_layers=8,
    num_heads=3,  # of width 128: kernels are made for powers of two
    num_slots=64,
    key_width=128,
    hgrn2_width=128,
    attention_width=64,
    seq_len=1024,
    batch_size=64,
    micro_batch_size=32,
    steps=400,
    data=DataConfig(),
    # A fifth of these few steps is warm-up. With less, attention overshoots most of all.
    optim=OptimConfig(lr=1.5e-3, min_lr=1.5e-4, warmup_fraction=0.2, weight_decay=0.01),
    eval_every=10**9,
    checkpoint_every=10**9,
    compile=True,
)
"""14M weights in the blocks, 19M in the embedding, which the head shares."""
TOY = replace(
    tiny(), d_model=32, num_layers=2, num_slots=64, seq_len=64, batch_size=2, eval_batches=2
)


def main(words: list[str] | None = None) -> int:
    """Train what the command line selects; return 0, or 2 when the user can mend a mistake."""
    try:
        run(parse(words), Console(soft_wrap=True))
    except UserError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    return 0


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Train one row after another, seed by seed, and write the result after each."""
    for name in arguments.rows:
        if name not in NAMES:
            raise UserError(f"--rows knows no {name!r}{nearest(name, NAMES)}")
    if not (arguments.dry_run or torch.cuda.is_available()):
        raise UserError("this takes hours without a CUDA GPU: --dry-run rehearses on a CPU")
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    configs = {
        (name, seed): configure(name, seed, arguments)
        for seed in arguments.seeds
        for name in arguments.rows
    }
    origin = environment(device)
    origin["commit"] = arguments.commit or origin["commit"]
    origin["setting"] = setting_words(next(iter(configs.values())), arguments)
    report = arguments.out / "ablation.json"
    runs = read_runs(report, origin)
    for (name, seed), config in configs.items():
        runs[NAMES[name], seed] = {
            "model": NAMES[name],
            "seed": seed,
            **measure(config, arguments.runs, device),
            "commit": origin["commit"],
            "date": origin["date"],
        }
        write(report, origin, runs)
        console.print(summary(runs[NAMES[name], seed]), markup=False, highlight=False)
    for line in orders(runs):
        console.print(line, markup=False, highlight=False)


def configure(name: str, seed: int, arguments: argparse.Namespace) -> TrainConfig:
    """Return the run of one row, on the given text."""
    hyperparameters = TOY if arguments.dry_run else SMALL
    data = DataConfig(source=arguments.data, tokenizer=arguments.tokenizer)
    hyperparameters = replace(hyperparameters, data=data, steps=arguments.steps)
    config = train_config(f"ablation_{name}", hyperparameters, name)
    # The head is tied to the embedding: so few tokens cannot train another matrix.
    return replace(config, seed=seed, model=replace(config.model, tie_embeddings=True))


def measure(config: TrainConfig, folder: Path, device: torch.device) -> dict[str, Any]:
    """Train once; return the run's results. All runs share the folder of the tokenized text."""
    torch.compiler.reset()
    gc.collect()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    result = train(config, folder, resume=False, quiet=True, device=device)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [(row["step"], round(row["loss"], 4)) for row in log if "loss" in row]
    with torch.device("meta"):
        parameters = config.model.build().num_parameters()
    assert result.val_perplexity is not None
    return {
        "perplexity": round(result.val_perplexity, 3),
        "parameters": parameters,
        "tokens_per_second": round(result.tokens_per_second),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if cuda else None,
        "train": steps[:: max(1, len(steps) // 100)],
    }


def summary(run: Mapping[str, Any]) -> str:
    """Return a run's results in one line."""
    memory = "" if run["peak_gb"] is None else f", {run['peak_gb']} GB"
    return (
        f"{run['model']}, seed {run['seed']}: validation perplexity {run['perplexity']}, "
        f"{run['parameters']:,} weights, {run['tokens_per_second']:,} tokens/s{memory}"
    )


def orders(runs: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[str]:
    """Compare the order in each group of the table with ours, over the seeds of all its rows."""
    printed = TABLE.column(TABLE.columns[0], REFERENCE)
    lines = []
    for group in dict.fromkeys(PAPER_GROUPS.values()):
        if group == REFERENCE:
            continue
        values = {**printed, **TABLE.column(TABLE.columns[0], group)}
        names = sorted((name for name in values), key=values.__getitem__)
        found = [{seed for model, seed in runs if model == name} for name in names]
        seeds = sorted(set.intersection(*found))
        if not seeds:
            lines.append(f"{group}: not all of its rows were trained")
            continue
        ours = {name: [runs[name, seed]["perplexity"] for seed in seeds] for name in names}
        order = compare_order(names, ours, "lower", printed=values)
        lines.append(f"{group}: {order.verdict.value} ({order.ranking(ours, 'lower')})")
        lines += [f"  {sentence}" for sentence in order.sentences()]
    return lines


def setting_words(config: TrainConfig, arguments: argparse.Namespace) -> str:
    """Return a description of the conditions that all runs share."""
    tokens = config.steps * config.batch_size * config.seq_len
    precision = "a rehearsal at toy size, fp32" if arguments.dry_run else "bf16 autocast"
    return (
        f"C {config.model.d_model}, {len(config.model.mixers)} layers, T {config.seq_len}, "
        f"{config.steps} steps of {config.batch_size} sequences ({tokens:,} tokens of "
        f"{Path(arguments.data).name}, tokenizer {Path(arguments.tokenizer).name}), lr "
        f"{config.optim.lr:g}, warm-up {config.optim.warmup_fraction:.0%} of the steps, "
        f"{precision}, torch.compile {'on' if config.compile else 'off'}"
    )


def write(
    path: Path, origin: Mapping[str, Any], found: Mapping[tuple[str, int], Mapping[str, Any]]
) -> None:
    """Write the experiment and its figure, in the order of the table."""
    seeds = sorted({seed for _, seed in found})
    keys = [(model, seed) for model in NAMES.values() for seed in seeds if (model, seed) in found]
    runs = [found[key] for key in keys]
    content = {
        "id": CLAIMS,
        "same_setting": False,
        "columns": list(TABLE.columns),
        "unit": TABLE.unit,
        "better": TABLE.better,
        "rows": [
            {
                "group": GROUPS[run["model"]],
                "model": run["model"],
                "seed": run["seed"],
                "values": [run["perplexity"]],
            }
            for run in runs
        ],
        **origin,
        "orders": orders(found),
        "runs": runs,
    }
    write_result(path, content, partial(draw, runs))


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the training losses of each row's first seed, and the perplexities of all seeds."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    losses, perplexities = figure.subplots(1, 2)
    models = list(dict.fromkeys(run["model"] for run in runs))
    for place, model in enumerate(models):
        ours = [run for run in runs if run["model"] == model]
        losses.plot(*zip(*ours[0]["train"], strict=True), label=model, linewidth=1.2)
        values = [run["perplexity"] for run in ours]
        perplexities.plot(values, [place] * len(values), "o", color=f"C{place % 10}")
    losses.set(xlabel="step", ylabel="training loss (nats a token)")
    losses.legend(frameon=False, fontsize=8)
    perplexities.set_yticks(range(len(models)), models)
    perplexities.invert_yaxis()
    perplexities.set(xlabel="validation perplexity, a dot a seed")
    for axes in (losses, perplexities):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)


def parse(words: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--data", default="embedded", help="a file, a folder or a glob of text")
    parser.add_argument("--tokenizer", default="byte")
    parser.add_argument("--runs", type=Path, default=Path("runs/gsa_ablation"), help="scratch")
    parser.add_argument("--rows", nargs="+", default=list(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--steps", type=int, default=SMALL.steps)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--commit", help="of the code, where no checkout tells it")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on a CPU")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
