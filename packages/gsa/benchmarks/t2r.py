"""Train a Transformer on one GPU, turn it into GSA, GLA and RetNet, and fine-tune each.

    python packages/gsa/benchmarks/t2r.py --data 'data/*.jsonl.xz' --tokenizer gpt2/ \
        --out packages/gsa/results/nvidia-h200
    python packages/gsa/benchmarks/t2r.py --smoke --out DIR        # toy sizes, on a CPU

The Transformer is a small Mistral: grouped keys, RoPE, SwiGLU. The fine-tuning trains all weights,
on the same tokens for every target. GSA is also trained from nothing, with the tokens of the
fine-tuning and the learning rate of the Transformer. Writes t2r.json (an experiment, see
mezzo_core.papers.results, with each run's losses; the first point of a fine-tuning is the converted
model) and t2r.png after each run. Rows of other seeds stay if all other options are the same. The
committed run has --pretrain-steps 700 --tune-steps 150.
"""

import argparse
import gc
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from mezzo_core.bench import environment
from mezzo_core.data import DataConfig
from mezzo_core.errors import UserError
from mezzo_core.eval.evaluate import evaluate
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.checkpoint import load_model, save_model
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.papers.runs import SAME, read_runs, write_result
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_core.train.loop import train
from mezzo_gsa.convert import TARGETS, convert
from rich.console import Console

CLAIM = "gsa.claim.t2r_order"
TRANSFORMER = "Transformer"
CONVERTED = {
    "gsa": "GSA",
    "gsa_spread": "GSA, slots started apart",
    "gla": "GLA",
    "retnet": "RetNet",
}
CONTROL = "GSA from nothing"
MODELS = (TRANSFORMER, *CONVERTED.values(), CONTROL)
MODEL = LMConfig(
    vocab_size=50_257,
    d_model=512,
    mixers=(AttentionConfig(head_dim=64, num_kv_heads=2),) * 8,
    mlp=MLPConfig("swiglu"),
    norm_eps=1e-5,
)
TOY = replace(
    MODEL, vocab_size=257, d_model=32, mixers=(AttentionConfig(head_dim=8, num_kv_heads=2),) * 2
)
POINTS = 10
"""Evaluations along a fine-tuning."""


@dataclass(frozen=True)
class Bench:
    """The folders of one seed's runs, and the options that the runs share."""

    arguments: argparse.Namespace
    seed: int
    device: torch.device

    @property
    def work(self) -> Path:
        """The folder in which all runs train in turn, so that the text is tokenized once."""
        return self.arguments.runs / "work"

    def start(self, name: str) -> Path:
        """Return the folder of a model that a run starts from."""
        return self.arguments.runs / f"{name}-{self.seed}"

    def config(self, model: LMConfig, steps: int, lr: float, start: Path | None) -> TrainConfig:
        """Return one run."""
        a = self.arguments
        return TrainConfig(
            name="t2r",
            model=model,
            data=DataConfig(source=a.data, tokenizer=a.tokenizer),
            optim=OptimConfig(lr=lr, min_lr=lr / 10, warmup_fraction=0.1, weight_decay=0.01),
            seq_len=a.seq_len,
            batch_size=a.batch_size,
            steps=steps,
            seed=self.seed,
            eval_every=max(1, steps // POINTS),
            eval_batches=a.eval_batches,
            checkpoint_every=steps,
            compile=a.compile,
            init_from=None if start is None else str(start),
        )


def main(words: list[str] | None = None) -> int:
    """Run what the command line selects; return 0, or 2 when the user can mend a mistake."""
    try:
        run(parse(words), Console())
    except UserError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    return 0


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Train, convert and fine-tune, seed after seed; write the result after each run."""
    if not (arguments.smoke or torch.cuda.is_available()):
        raise UserError("this needs a CUDA GPU: --smoke rehearses on a CPU")
    device = torch.device("cpu" if arguments.smoke else "cuda")
    origin = environment(device)
    origin["commit"] = arguments.commit or origin["commit"]
    origin["setting"] = setting_words(arguments)
    report = arguments.out / "t2r.json"
    runs = read_runs(report, origin, same=(*SAME, "commit"))
    for seed in arguments.seeds:
        bench = Bench(arguments, seed, device)
        for name, measure in plan(bench).items():
            runs[name, seed] = {"model": name, "seed": seed} | measure()
            write(report, origin, runs)
            console.print(summary(runs[name, seed]), markup=False, highlight=False, soft_wrap=True)


def plan(bench: Bench) -> dict[str, Any]:
    """Return the runs of a seed in order, by model, as functions that return their results."""
    a = bench.arguments
    model = TOY if a.smoke else MODEL

    def pretrain() -> dict[str, Any]:
        found = measured(bench, bench.config(model, a.pretrain_steps, a.lr, None))
        shutil.rmtree(bench.start("transformer"), ignore_errors=True)
        shutil.copytree(bench.work / "model", bench.start("transformer"))
        return found

    def tune(target: str) -> dict[str, Any]:
        transformer, config, extra = load_model(bench.start("transformer"))
        new, weights = convert(config, transformer.state_dict(), TARGETS[target], seed=bench.seed)
        with torch.device("meta"):
            built = new.build()
        save_model(built, new, bench.start(target), extra, weights=weights)
        return measured(bench, bench.config(new, a.tune_steps, a.tune_lr, bench.start(target)))

    def control() -> dict[str, Any]:
        _, config, _ = load_model(bench.start("gsa"))
        return measured(bench, bench.config(config, a.tune_steps, a.lr, None))

    tunings = {CONVERTED[target]: lambda target=target: tune(target) for target in CONVERTED}
    return {TRANSFORMER: pretrain, **tunings, CONTROL: control}


def measured(bench: Bench, config: TrainConfig) -> dict[str, Any]:
    """Evaluate the initial model of a run, train it, and return the results."""
    # Each model is compiled anew, and memory that an earlier one left does not count for this one.
    torch.compiler.reset()
    gc.collect()
    cuda = bench.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = []
    if config.init_from is not None:
        before = [(0, round(validation_loss(bench, config), 4))]
    result = train(config, bench.work, resume=False, quiet=True, device=bench.device)
    log = [json.loads(line) for line in (bench.work / "log.jsonl").read_text().splitlines()]
    steps = [(row["step"], round(row["loss"], 4)) for row in log if "loss" in row]
    with torch.device("meta"):
        parameters = config.model.build().num_parameters()
    return {
        "val_perplexity": round(result.val_perplexity, 3),
        "parameters": parameters,
        "steps": config.steps,
        "lr": config.optim.lr,
        "tokens_per_second": round(result.tokens_per_second),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if cuda else None,
        "train": steps[:: max(1, len(steps) // 100)],
        "val": before
        + [(row["step"], round(row["val_loss"], 4)) for row in log if "val_loss" in row],
    }


def validation_loss(bench: Bench, config: TrainConfig) -> float:
    """Return the loss of a run's initial model on the text of its evaluations."""
    model, _, _ = load_model(config.init_from, device=bench.device)
    data = config.data.build(config.seq_len, bench.work / "packed")
    batches = islice(data.validation_batches(config.batch_size), config.eval_batches)
    return evaluate(model, batches).loss


def setting_words(a: argparse.Namespace) -> str:
    """Return a description of the conditions that all runs share."""
    model, per_step = (TOY if a.smoke else MODEL), a.batch_size * a.seq_len
    mixer = model.mixers[0]
    how = "a rehearsal at toy size, fp32" if a.smoke else "bf16 autocast"
    return (
        f"C {model.d_model}, {len(model.mixers)} layers, {model.d_model // mixer.head_dim} heads "
        f"of {mixer.head_dim}, {mixer.num_kv_heads} of keys, T {a.seq_len}, {per_step:,} tokens a "
        f"step of {Path(a.data).name}, tokenizer {Path(a.tokenizer).name}; the Transformer "
        f"{a.pretrain_steps} steps at lr {a.lr:g}, then each target {a.tune_steps} steps at lr "
        f"{a.tune_lr:g}; {how}, torch.compile {'on' if a.compile else 'off'}"
    )


def write(
    path: Path, origin: Mapping[str, Any], found: Mapping[tuple[str, int], Mapping[str, Any]]
) -> None:
    """Write the experiment and its figure, the models in the order of MODELS."""
    runs = sorted(found.values(), key=lambda run: (MODELS.index(run["model"]), run["seed"]))
    content = {
        "id": [CLAIM],
        "same_setting": False,
        "columns": ["Val. PPL"],
        "unit": "perplexity",
        "better": "lower",
        "rows": [
            {"model": run["model"], "seed": run["seed"], "values": [run["val_perplexity"]]}
            for run in runs
        ],
        **origin,
        "runs": runs,
    }
    write_result(path, content, partial(draw, runs))


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the validation loss of each fine-tuning of the first seed, and the Transformer's."""
    first = {run["model"]: run for run in runs if run["seed"] == runs[0]["seed"]}
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for model, run in first.items():
        steps, losses = zip(*run["val"], strict=True)
        if model == TRANSFORMER:
            axes.axhline(losses[-1], color="gray", linestyle="--", label="the Transformer")
        else:
            axes.plot(steps, losses, marker=".", label=model)
    axes.set(xlabel="step", ylabel="validation loss (nats a token)")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)


def summary(run: Mapping[str, Any]) -> str:
    """Return a run's results in one line."""
    step, loss = run["val"][0]
    start = f", validation loss {loss} as converted" if step == 0 else ""
    return (
        f"{run['model']}, seed {run['seed']}: {run['tokens_per_second']:,} tokens/s{start}, "
        f"validation perplexity {run['val_perplexity']} after {run['steps']} steps"
    )


def parse(words: list[str] | None) -> argparse.Namespace:
    """Read the command line; --smoke changes the defaults."""
    smoke = "--smoke" in (sys.argv[1:] if words is None else words)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--data", default="embedded", help="a corpus: a file, a folder or a glob")
    parser.add_argument("--tokenizer", default="byte")
    parser.add_argument("--runs", type=Path, default=Path("runs/t2r"), help="scratch")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--pretrain-steps", type=int, default=20 if smoke else 900)
    parser.add_argument("--tune-steps", type=int, default=10 if smoke else 200)
    parser.add_argument("--lr", type=float, default=3e-3 if smoke else 1e-3)
    parser.add_argument("--tune-lr", type=float, default=1e-3 if smoke else 3e-4)
    parser.add_argument("--batch-size", type=int, default=4 if smoke else 32, help="sequences")
    parser.add_argument("--seq-len", type=int, default=64 if smoke else 1024)
    parser.add_argument(
        "--eval-batches",
        type=int,
        default=2 if smoke else None,
        help="read at an evaluation; all of the validation part by default",
    )
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=not smoke, help="torch.compile"
    )
    parser.add_argument("--commit", help="of the code, where no checkout tells it")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, on a CPU")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
