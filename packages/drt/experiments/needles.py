"""Find passkeys, and follow paths of two hops, in texts of up to 32 million tokens (Table 2).

    python packages/drt/experiments/needles.py --data TEXTS --seeds 0 --jobs 6 \
        --out packages/drt/results/nvidia-h100
    python packages/drt/experiments/needles.py --out DIR --dry-run    # on a CPU

Trains each model on rows of up to 131,072 tokens (Landmark Attention: 768), first on long keys in
short rows, then on the task, from there on two paths, as the paper's example has them, and from
there on eight. DRT compares landmarks as the paper's released code does, with a norm in place of
projections.

After each of the three tasks it measures how many answers of held-out rows are right, at each
length of Table 2 and at 1M, 4M and 32M tokens, the shortest first. Rows go through the model in
segments, and DRT's chunks to the host's memory. Writes passkey.json, two_hop.json and
eight_paths.json. `--models` takes some alone; what `--runs` has is not trained again, and what the
files have is not measured again. `--cuda-graph` replays the steps of the trainings.

Stages and lengths are meant for the default tokenizer, whose tokens are bytes. TEXTS should then
have 47 MB or more: with less, the longest rows read the held-out part more than once. Both parts
should have the same kinds of text.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mezzo_core.data import DataConfig, load_tokenizer
from mezzo_core.data.tokenized_corpus import token_store
from mezzo_core.eval.evaluate import evaluate_segments
from mezzo_core.nn import LM, LMConfig
from mezzo_core.nn.checkpoint import copy_weights
from mezzo_core.reproduction import OOM, Cell, Entry, Options, attempt, run_script, say
from mezzo_core.reproduction.runner import Job
from mezzo_core.reproduction.timing import peak_gb, start_afresh
from mezzo_core.reproduction.training import corpus_name, measure_run
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_drt import DRTConfig
from mezzo_drt.baselines import landmark_lm
from mezzo_drt.needles import AbstractNeedleConfig, HopsConfig, NeedleData, PasskeyConfig
from mezzo_drt.recipes import ARCHITECTURES, PAPER_NAMES, small

DRT1, DRT2, LANDMARK = PAPER_NAMES["drt1"], PAPER_NAMES["drt2"], "Landmark Attn."
DEEP = "BaseLM +2 layers"
MODELS = (DEEP, LANDMARK, DRT1, DRT2)
RECIPES = {DEEP: "base_deep", DRT1: "drt1", DRT2: "drt2"}
REACH = {DEEP: 2**18, LANDMARK: 2**16}
"""Tokens of the longest rows of models that are not measured further."""
EVAL_EVERY = 200
"""Steps of a training between evaluations."""
LANDMARK_LEN = 768
"""Tokens of Landmark Attention's rows in training: as many as it sees in full."""
LANDMARK_ROWS = 16
"""The most rows of a step of its training, which computes all logits of all chunks in float32."""
HELD_OUT = 0.36
"""The share of the text for test rows."""
TOGETHER = 2**18
"""The most tokens of test rows that go through a model at once, if it is more than one row."""
LANDMARK_TOKENS = 2**19
"""Tokens of a length's test rows for Landmark Attention, which is slow."""
TWO_PATHS, MANY_PATHS = HopsConfig(), HopsConfig(num_noise=7)
"""The paper's example, and 16 needles, more than the chunks that one retrieval reads."""
SAMPLES = {
    **dict.fromkeys(("1K", "4K", "8K", "16K", "32K", "64K"), 96),
    **{"128K": 32, "256K": 32, "1M": 16, "4M": 8, "16M": 8, "32M": 8},
}
"""Test rows of each length."""


@dataclass(frozen=True)
class Stage:
    """A part of a training: it begins with the weights that the stage before ends with."""

    task: AbstractNeedleConfig
    seq_len: int
    batch_size: int
    steps: int
    lr: float
    until: float | None = None
    """It ends before its steps once this share of the answers' tokens is right."""
    gumbel_noise: bool = True


class Table(NamedTuple):
    """A result: its models train through the stages of the tables before it, then through these."""

    what: str
    models: tuple[str, ...]
    columns: tuple[str, ...]
    stages: tuple[Stage, ...]


LONG_ROWS = Stage(
    PasskeyConfig(), seq_len=131_072, batch_size=1, steps=2400, lr=5e-4, gumbel_noise=False
)
"""Among 2,048 chunks, noise would choose most of what is read. Without noise the model reads the
chunks that fit best, and learns to tell them from the needle. In still longer texts, such chunks
would otherwise take the needle's weight."""
PASSKEY, TWO_HOP, EIGHT_PATHS = "passkey", "two_hop", "eight_paths"
TABLES = {
    PASSKEY: Table(
        "A passkey",
        MODELS,
        ("4K", "8K", "16K", "32K", "64K", "128K", "256K", "1M", "4M", "16M", "32M"),
        (
            Stage(PasskeyConfig(key_tokens=128), 512, 16, steps=4800, lr=1e-3, until=0.9),
            # A chunk's border cuts one key in seven: too few for the share of right tokens to tell
            # when those are learned. So this stage takes all its steps.
            Stage(PasskeyConfig(), 1024, 32, steps=3000, lr=1e-3),
            Stage(PasskeyConfig(), 4096, 32, steps=400, lr=1e-3),
            # In a long text a few odd chunks may fit the question better than the needle. The
            # retrieval learns from such a chunk only in a row that holds it, so many rows are long.
            Stage(PasskeyConfig(), 16384, 8, steps=800, lr=5e-4),
            LONG_ROWS,
        ),
    ),
    TWO_HOP: Table(
        "Paths of two hops, one of two",
        (LANDMARK, DRT1, DRT2),
        ("1K", "4K", "16K", "64K", "256K", "4M"),
        (
            Stage(TWO_PATHS, 1024, 64, steps=800, lr=1e-3, until=0.99),
            Stage(TWO_PATHS, 4096, 32, steps=400, lr=1e-3, until=0.99),
            Stage(TWO_PATHS, 16384, 8, steps=400, lr=5e-4),
            replace(LONG_ROWS, task=TWO_PATHS, steps=400),
        ),
    ),
    EIGHT_PATHS: Table(
        "Paths of two hops, one of eight",
        (LANDMARK, DRT1, DRT2),
        ("4K", "16K", "64K", "256K", "4M"),
        (
            # Rows of 1,024 tokens have 16 chunks, so that two retrievals could bring them all.
            Stage(MANY_PATHS, 4096, 32, steps=1200, lr=1e-3, until=0.99),
            Stage(MANY_PATHS, 16384, 8, steps=400, lr=5e-4),
            replace(LONG_ROWS, task=MANY_PATHS, steps=400),
        ),
    ),
}


class Size(NamedTuple):
    """The sizes of models."""

    d_model: int  # C
    stack: DRTConfig  # of DRT with one retrieval, whose layers and widths the others take too
    segment: int  # tokens that a model reads at a time


FULL = Size(
    256,
    DRTConfig(
        num_layers=4,
        num_encoder_layers=1,
        head_dim=32,
        hidden=768,
        projections=False,
        residual="text",
        softmax1=False,
    ),
    2**16,
)
TOY = Size(16, replace(FULL.stack, num_layers=2, head_dim=16, hidden=32), 2**10)
"""Of a rehearsal on a CPU."""


def size(options: Options) -> Size:
    """Return the sizes of models."""
    return TOY if options.dry_run else FULL


def tables(options: Options) -> dict[str, Table]:
    """Return the tables; in a dry run with their first length, and toys of two stages."""
    if not options.dry_run:
        return TABLES
    toys = {}
    for name, table in TABLES.items():
        stages = tuple(
            replace(s, task=replace(s.task, test_rows=2), seq_len=512, batch_size=1, steps=1)
            for s in (table.stages[0], table.stages[-1])
        )
        toys[name] = table._replace(stages=stages, columns=table.columns[:1])
    return toys


def measure(options: Options) -> None:
    """Train and measure all models on one task, and then, from there on, on the next."""
    for name, table in tables(options).items():
        jobs = []
        for seed, model in product(options.seeds, table.models):
            lengths = [c for c in table.columns if num_tokens(c) <= REACH.get(model, 2**30)]
            cells = tuple(Cell(model, column, seed=seed) for column in lengths)
            jobs.append(Job(cells, partial(train_and_ask, name, options)))
        options.run(name, jobs, **header(name, options))


def train_and_ask(
    name: str, options: Options, cells: tuple[Cell, ...], _: Path, device: torch.device
) -> Iterator[list[Entry]]:
    """Train stage after stage, each in its own folder, where one that is done is only read.

    Yields:
        The share of right answers in % at each length, on short texts first, and the memory that it
        took to find them.
    """
    model, _, _, seed = cells[0]
    runs = runs_of(name, model, seed, options)
    for home, config in runs.items():
        details = measure_run(config, home, device, resume=True)
    say(f"{model}: trained on {name}, seed {seed}")
    for cell in cells:
        T, samples = num_tokens(cell.column), 2 if options.dry_run else SAMPLES[cell.column]
        if model == LANDMARK:
            samples = min(samples, max(1, LANDMARK_TOKENS // T))
        task = replace(on_text(stages(name, options)[-1].task, options), test_rows=samples)
        rows = min(max(1, TOGETHER // T), samples)
        # DRT's chunks go to the host's memory.
        with device:
            lm = configure(model, options, offload=model != LANDMARK).build()
        copy_weights(home / "model", lm)
        data = task.build(T, token_store())
        found = attempt(partial(ask, lm, data, rows, size(options).segment, device))
        told = {} if isinstance(found, str) else {"samples": samples, "rows": rows, **found}
        if cell.column == tables(options)[name].columns[0]:
            told |= {k: details[k] for k in ("parameters", "steps")}
        yield [cell.entry(told.pop("exact_match", OOM), **told)]


def stages(name: str, options: Options) -> list[Stage]:
    """Return the stages that lead to a table."""
    every = tables(options)
    before = islice(every.values(), [*every].index(name) + 1)
    return [stage for table in before for stage in table.stages]


def runs_of(name: str, model: str, seed: int, options: Options) -> dict[Path, TrainConfig]:
    """Return the runs that lead to a model of a table's task, by their folders, in order."""
    runs: dict[Path, TrainConfig] = {}
    before: str | None = None
    for i, stage in enumerate(stages(name, options)):
        home = options.runs / f"stage_{MODELS.index(model)}_{seed}_{i}"
        length, rows = stage.seq_len, stage.batch_size
        if model == LANDMARK:
            length = min(length, LANDMARK_LEN)
            rows = min(rows * stage.seq_len // length, LANDMARK_ROWS)
        runs[home] = TrainConfig(
            name=f"stage_{i}",
            model=configure(model, options, gumbel_noise=stage.gumbel_noise),
            data=on_text(stage.task, options),
            optim=OptimConfig(
                lr=stage.lr, min_lr=stage.lr / 10, warmup_fraction=0.1, weight_decay=1e-3
            ),
            seq_len=length,
            batch_size=rows,
            steps=stage.steps,
            seed=seed,
            eval_every=EVAL_EVERY,
            stop_at_accuracy=stage.until,
            checkpoint_every=stage.steps,
            cuda_graph=options.cuda_graph,
            init_from=before,
        )
        before = str(home / "model")
    return runs


def configure(model: str, options: Options, **changes: bool) -> LMConfig:
    """Return a model; the changes are those of DRT's stack."""
    like = replace(
        small(),
        vocab_size=load_tokenizer(options.tokenizer).vocab_size,
        d_model=size(options).d_model,
        drt=replace(size(options).stack, **changes),
    )
    return landmark_lm(like) if model == LANDMARK else ARCHITECTURES[RECIPES[model]](like)


def ask(lm: LM, data: NeedleData, rows: int, segment: int, device: torch.device) -> dict[str, Any]:
    """Ask the question of each test row, of so many rows at a time; return what came of it."""
    start_afresh()
    found = evaluate_segments(lm, data.test_segments(segment, rows))
    assert found.exact_match is not None
    return {
        "exact_match": 100 * found.exact_match,
        "accuracy": 100 * found.accuracy,
        "peak_gb": peak_gb(device),
    }


def num_tokens(column: str) -> int:
    """Return the tokens of a length such as "4K"."""
    return int(column[:-1]) * {"K": 2**10, "M": 2**20}[column[-1]]


def on_text(task: AbstractNeedleConfig, options: Options) -> AbstractNeedleConfig:
    """Return a task in the given text."""
    text = DataConfig(options.data, options.tokenizer, validation_fraction=HELD_OUT)
    return replace(task, text=text, chunk_size=size(options).stack.chunk_size)


def header(name: str, options: Options) -> dict[str, Any]:
    """Return what the header of a task's result says."""
    sizes, table = size(options), tables(options)[name]
    c = sizes.stack
    told = ", then ".join(
        f"{s.steps} steps{f' or until {s.until:.0%} of tokens are right' if s.until else ''} of "
        f"{s.batch_size} rows of {s.seq_len} (lr {s.lr:g}, {s.task.name}"
        f"{'' if s.gumbel_noise else ', without noise on the scores'})"
        for s in stages(name, options)
    )
    samples = ", ".join(f"{SAMPLES[column]} at {column}" for column in table.columns)
    setting = (
        f"C {sizes.d_model}, {c.num_layers} layers (BaseLM two more), window {c.window_size}, "
        f"chunks of {c.chunk_size}, {c.num_retrieved} retrieved, {c.residual} residual, "
        f"softmax1 {'on' if c.softmax1 else 'off'}, landmarks without projections",
        f"trained from scratch on needles in {corpus_name(options.data)}, tokenizer "
        f"{Path(options.tokenizer).name}: {told}; Landmark Attention on at most {LANDMARK_ROWS} "
        f"rows of {LANDMARK_LEN}",
        f"share of rows of held-out text in which every token of the answer is right: {samples} "
        f"(Landmark Attention: at most {LANDMARK_TOKENS} tokens), in segments of {sizes.segment}, "
        "DRT's chunks on the host",
    )
    return {
        "kind": "recall",
        "title": f"{table.what} in texts of up to {table.columns[-1]} tokens (Table 2)",
        "setting": "; ".join(setting),
        "unit": "%",
        "better": "higher",
    }


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, MODELS, trains=True, parallel=True, replayed=True))
