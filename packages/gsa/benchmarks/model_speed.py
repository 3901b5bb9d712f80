"""Measure Figure 4 and footnote 7 at the paper's size: 1.3B models on one GPU.

    python packages/gsa/benchmarks/model_speed.py --out packages/gsa/results/nvidia-h200
    python packages/gsa/benchmarks/model_speed.py --out DIR --only training --models GSA GLA
    python packages/gsa/benchmarks/model_speed.py --out DIR --dry-run      # toy sizes, on a CPU

Writes speed_training.json (tokens a second on batches of 16,384 tokens), speed_memory.json (the
peak of the same steps), speed_slots.json (footnote 7) and speed_generation.json (latency after a
prompt of 2,048 tokens), each an experiment (see mezzo_core.papers.results), after every cell; and
speed_fig4.png at the end. A second run measures only the cells that this commit does not have yet.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from mezzo_core.bench import environment, measure
from mezzo_core.errors import UserError, nearest
from mezzo_core.layer_bench import Layer, check_layer
from mezzo_core.nn.generate import Decoder, Sampler
from mezzo_core.nn.lm import LM, LMConfig
from mezzo_core.papers.cells import Key, Result, Say, SpeedTable, Timed, add_cell, describe
from mezzo_core.train.config import OptimConfig
from mezzo_core.train.optim import build_optimizer
from mezzo_gsa.bench import fla
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.recipes import recipe
from rich.console import Console
from torch import Tensor

FLA = "GSA, fla's layer"
ARCHITECTURES = {
    "Xfmr++": "attention",
    "RetNet": "retnet",
    "GLA": "gla",
    "GSA": "gsa",
    "GSA w/o recomp.": "gsa",
    FLA: "gsa",
    "32 slots": "gsa_m32",
    "128 slots": "gsa_m128",
}
"""The recipe of each model."""
TRAINED = ("Xfmr++", "RetNet", "GLA", "GSA", "GSA w/o recomp.", FLA)
SLOTS = {"32 slots": "32 slots", "GSA": "64 slots", "128 slots": "128 slots"}
"""The names of the models in footnote 7."""
GENERATING = ("Xfmr++", "RetNet", "GLA", "GSA")
PARTS = ("training", "slots", "generation")
Places = list[tuple[Result, Key]]
"""The cells that one timing fills, each with its result file."""


@dataclass(frozen=True)
class Shapes:
    """The shapes of one run.

    Attributes:
        device: "cuda", or "cpu" for a rehearsal.
        size: of the models, as the recipes' names begin.
        tokens: of a batch.
        lengths: T; the first is footnote 7's.
        prompt: tokens before the first new one.
        new_tokens: of the generations.
        passes: timings of each cell, one after another.
    """

    device: str
    size: str
    tokens: int
    lengths: tuple[int, ...]
    prompt: int
    new_tokens: tuple[int, ...]
    passes: int


FULL = Shapes("cuda", "1p3b", 16_384, (2048, 4096, 8192, 16_384), 2048, (512, 1024, 2048), 3)
DRY = Shapes("cpu", "tiny", 128, (32, 64), 16, (4, 8), 2)


def main(words: list[str] | None = None) -> int:
    """Measure what the command line selects; return 0, or 2 when the user can mend a mistake."""
    console = Console()
    try:
        run(parse(words), partial(console.print, markup=False, highlight=False, soft_wrap=True))
    except UserError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    return 0


def run(arguments: argparse.Namespace, say: Say) -> None:
    """Measure one model after another."""
    shapes = DRY if arguments.dry_run else FULL
    _check(arguments, shapes)
    origin = environment(torch.device(shapes.device))
    origin["commit"] = arguments.commit or origin["commit"]
    compiles = shapes.device == "cuda" and not arguments.no_compile
    results = {
        name: Result(table, arguments.out, origin)
        for name, table in result_files(shapes, compiles).items()
    }
    checked: set[Any] = set()
    for name in arguments.models:
        cells = {
            T: places
            for T in shapes.lengths
            if (not arguments.lengths or T in arguments.lengths)
            and (places := training_places(name, T, shapes, arguments.only, results))
        }
        if any(not result.has(key) for (result, key), *_ in cells.values()):
            config = model_config(name, shapes)
            check_once(config, shapes, checked)
            measure_training(name, config, shapes, cells, results["memory"], compiles, say)
        for places in cells.values():
            copy_cells(places)
        if "generation" in arguments.only and name in GENERATING:
            check_once(model_config(name, shapes), shapes, checked)
            measure_generation(name, shapes, results["generation"], say)
    draw(results, arguments.out / "speed_fig4.png")


def training_places(
    name: str, T: int, shapes: Shapes, only: Sequence[str], results: Mapping[str, Result]
) -> Places:
    """Return the cells that training a model on sequences of T tokens fills."""
    places: Places = []
    if "training" in only and name in TRAINED:
        places.append((results["training"], ("", name, str(T))))
    if "slots" in only and name in SLOTS and shapes.lengths[0] == T:
        places.append((results["slots"], ("", SLOTS[name], str(T))))
    return places


def result_files(shapes: Shapes, compiles: bool) -> dict[str, SpeedTable]:
    """Return a description of each result file, by its name."""
    how = "the blocks compiled" if compiles else "nothing compiled"
    rehearsal = "; a rehearsal on a CPU" if shapes.device == "cpu" else ""
    step = (
        f"whole training steps (forward, backward, fused AdamW) of the {shapes.size} recipes' "
        f"models on {shapes.tokens:,} tokens, sequences of T, bf16 autocast over float32 weights, "
        f"{how}, random tokens"
    )
    decode = (
        f"one sequence, a prompt of {shapes.prompt:,} tokens and then N new ones, greedy, bf16 "
        "weights; prompt and capture of the CUDA graph included"
    )
    suffix = "" if compiles or shapes.device == "cpu" else "_eager"
    lengths, first = tuple(map(str, shapes.lengths)), (str(shapes.lengths[0]),)
    marks = tuple(map(str, shapes.new_tokens))
    claims = ("gsa.claim.train_throughput", "gsa.claim.recompute")
    speed = ("thousand tokens/s", "higher")
    rows: dict[str, tuple[Any, ...]] = {
        "training": (claims, lengths, TRAINED, *speed, step),
        "memory": (claims[1:], lengths, TRAINED, "GiB", "lower", f"peak memory of {step}"),
        "slots": (("gsa.claim.slot_throughput",), first, tuple(SLOTS.values()), *speed, step),
        "generation": (("gsa.claim.inference",), marks, GENERATING, "s", "lower", decode),
    }
    return {
        name: SpeedTable(
            name=name + ("" if name == "generation" else suffix),
            ids=ids,
            columns=columns,
            models=models,
            ratios=(),
            unit=unit,
            better=better,
            setting=f"{words}; {shapes.passes} passes{rehearsal}",
        )
        for name, (ids, columns, models, unit, better, words) in rows.items()
    }


def model_config(name: str, shapes: Shapes) -> LMConfig:
    """Return the recipe's model; "GSA w/o recomp." keeps its states for the backward."""
    config = recipe(shapes.size, ARCHITECTURES[name]).model
    if name != "GSA w/o recomp.":
        return config
    kept = (replace(m, keep_states=True) if isinstance(m, GSAConfig) else m for m in config.mixers)
    return replace(config, mixers=tuple(kept))


def check_once(config: LMConfig, shapes: Shapes, checked: set[Any]) -> None:
    """Compare each new kind of layer with float32 on the CPU, so that no wrong layer is timed."""
    for mixer in set(config.mixers) - checked:
        torch.manual_seed(0)
        with torch.device(shapes.device):
            layer = Layer(mixer.build(config.d_model), config.d_model)
        check_layer(layer)
        checked.add(mixer)


def build(name: str, config: LMConfig, device: torch.device) -> LM:
    """Build a model after freeing an earlier one and its compiled code."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    with device:
        model = config.build()
    if name == FLA:
        gsa = config.mixers[0]
        assert isinstance(gsa, GSAConfig)
        fla.replace_mixers(model, config.d_model, gsa.num_heads, gsa.num_slots)
    return model


def measure_training(
    name: str,
    config: LMConfig,
    shapes: Shapes,
    cells: Mapping[int, Places],
    memory: Result,
    compiles: bool,
    say: Say,
) -> None:
    """Time steps on sequences of each T whose cell is not there at this commit."""
    device = torch.device(shapes.device)
    model = build(name, config, device)
    optimizer = build_optimizer(model, OptimConfig())
    if compiles:
        for block in model.stack.blocks:
            block.compile(dynamic=False, fullgraph=name != FLA)

    def step(tokens: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for T, ((result, key), *_) in cells.items():
        if result.has(key):
            continue
        tokens = torch.randint(model.vocab_size, (shapes.tokens // T, T + 1), device=device)
        add_cell(result, key, partial(time_steps, partial(step, tokens), shapes), say)
        cell = result.cells[key]
        if "peak_gb" in cell and name in TRAINED:
            memory.add(key, [cell["peak_gb"] * 1e9 / 2**30])


def time_steps(step: Callable[[], None], shapes: Shapes) -> Timed:
    """Return thousands of tokens a second, a value a pass."""
    timings = [
        measure(step, torch.device(shapes.device), seconds=0.0, warmup=2 * (i == 0), least=2)
        for i in range(shapes.passes)
    ]
    details = {
        "step_ms": statistics.fmean(timing.ms for timing in timings),
        "peak_gb": timings[-1].peak_gb,
    }
    return [shapes.tokens / timing.ms for timing in timings], details


def copy_cells(places: Places) -> None:
    """Copy the first cell to the others: the same steps answer two claims."""
    first, key = places[0]
    cell = first.cells[key]
    details = {k: cell[k] for k in ("step_ms", "peak_gb") if k in cell}
    for result, place in places[1:]:
        if not result.has(place):
            result.add(place, cell["values"], **details)


def measure_generation(name: str, shapes: Shapes, result: Result, say: Say) -> None:
    """Time a prompt and the tokens generated after it; all counts come from the same passes."""
    keys = {N: ("", name, str(N)) for N in shapes.new_tokens}
    if all(result.has(key) for key in keys.values()):
        return
    model = build(name, model_config(name, shapes), torch.device(shapes.device)).bfloat16().eval()
    generate(model, shapes, (2, 4))  # compiles kernels, loads libraries
    passes = [generate(model, shapes, shapes.new_tokens) for _ in range(shapes.passes)]
    prompt_ms = 1e3 * statistics.fmean(seconds[0] for seconds in passes)
    state_mb = model.state_bytes(shapes.prompt + max(shapes.new_tokens)) / 1e6
    details = {"prompt_ms": prompt_ms, "state_mb": state_mb}
    for N, key in keys.items():
        values = [seconds[N] for seconds in passes]
        result.add(key, values, **details)
        say(f"generation  {name} {N}  {describe(values, details)}")


@torch.inference_mode()
def generate(model: LM, shapes: Shapes, marks: Sequence[int]) -> dict[int, float]:
    """Return the seconds from the prompt's start to its end (0), and to each count of tokens."""
    device = torch.device(shapes.device)
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    prompt = torch.randint(model.vocab_size, (1, shapes.prompt), device=device)
    wait()
    start = time.perf_counter()
    logits, state = model(prompt, model.init_state(1), last_only=True)
    assert state is not None
    state = model.reserve(state, max(marks))
    decoder = Decoder(model, state, logits[:, -1].argmax(-1), Sampler())
    wait()
    seconds = {0: time.perf_counter() - start}
    for count in range(2, max(marks) + 1):  # the prompt gave the first
        decoder.step()
        if count in marks:
            wait()
            seconds[count] = time.perf_counter() - start
    return seconds


def draw(results: Mapping[str, Result], path: Path) -> None:
    """Draw Figure 4: throughput and memory over T, latency over the new tokens."""
    figure = Figure(figsize=(13, 4.0), layout="constrained")
    names = {"training": "T", "memory": "T", "generation": "new tokens"}
    for axes, (name, xlabel) in zip(figure.subplots(1, 3), names.items(), strict=True):
        table = results[name].table
        for model in table.models:
            points = []
            for column in table.columns:
                values = results[name].cells.get(("", model, column), {}).get("values", "-")
                if not isinstance(values, str):
                    points.append((int(column), statistics.fmean(values)))
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=model)
        axes.set_xscale("log", base=2)
        axes.set(xlabel=xlabel, ylabel=table.unit)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _check(arguments: argparse.Namespace, shapes: Shapes) -> None:
    for option, known in (("only", PARTS), ("models", ARCHITECTURES), ("lengths", shapes.lengths)):
        for value in getattr(arguments, option):
            if value not in known:
                raise UserError(
                    f"--{option} knows no {value!r}{nearest(str(value), map(str, known))}"
                )
    if FLA in arguments.models and not fla.is_installed():
        raise UserError(f"--models {FLA!r} needs flash-linear-attention, which is not installed")
    if shapes.device == "cuda" and not torch.cuda.is_available():
        raise UserError("the 1.3B models need a CUDA GPU: --dry-run rehearses on a CPU")


def parse(words: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--only", nargs="+", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    usual = [name for name in ARCHITECTURES if name != FLA]
    listing = ", ".join(ARCHITECTURES)
    parser.add_argument("--models", nargs="+", default=usual, help=f"of {listing}")
    parser.add_argument("--lengths", nargs="+", type=int, default=[], help="T of the training")
    parser.add_argument("--no-compile", action="store_true", help="run the blocks eagerly")
    parser.add_argument("--commit", help="of the code, where no checkout tells it")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on a CPU")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
