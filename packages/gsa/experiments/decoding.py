"""Train a large GSA and a small one, and time decoding: with an assistant, and prompts in turn.

    python packages/gsa/experiments/decoding.py --data 'texts/*.jsonl.xz' \
        --out packages/gsa/results/nvidia-h100
    python packages/gsa/experiments/decoding.py --dry-run --out DIR       # toy sizes, on a CPU

It writes decoding.json: new tokens a second, with the time of the prompts. Calls share their CUDA
graphs (`keep_graphs`), whose captures are not timed. All decode prompts of the validation part,
greedily; batches of one decode four prompts in turn. Beside each speed stands the share of tokens
that equal those of the column's first row; in float32 all must.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

import torch
from mezzo_core.data import load_tokenizer
from mezzo_core.data.tokenized_corpus import token_store
from mezzo_core.errors import UserError
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.nn.generate import generate
from mezzo_core.nn.kept_graphs import keep_graphs
from mezzo_core.nn.lm import LM
from mezzo_core.reproduction import Cell, Entry, Options, run_script
from mezzo_core.reproduction.runner import Job
from mezzo_core.reproduction.training import in_words, measure_run
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_gsa.recipes import SIZES, tiny, train_config

PLAIN, BATCHES, TURNS = "plain", "one batch after another", "continuous batching"
DRAFTED = {f"assistant, {n} tokens": n for n in (4, 7, 15)}
ROWS = (PLAIN, *DRAFTED, BATCHES, TURNS)
BATCH, LEAST_PROMPTS = {"batch 1": 1, "batch 8": 8}, 4
MANY, MANY_PROMPTS = "96 prompts in 16 rows", 96
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
PASSES = 3
LARGE = replace(
    SIZES["340m"][0](),
    seq_len=1024,
    batch_size=32,
    steps=600,
    optim=OptimConfig(lr=1e-3, min_lr=1e-4, warmup_fraction=0.1),
    eval_every=10**9,
    eval_batches=10,
    checkpoint_every=10**9,
)
"""302M weights in the blocks, as the recipes of this size."""
SMALL = replace(LARGE, num_layers=2, num_heads=2, d_model=512, steps=2400)
"""6M weights in the blocks, trained four times as long: a step costs little, and each token on
which both agree spares one of the large model."""
TOY = replace(tiny(), d_model=32, num_layers=2, seq_len=32, steps=3, eval_batches=1)
SIZES_OF = {"large": (LARGE, TOY), "small": (SMALL, replace(TOY, d_model=16, num_layers=1))}
"""The sizes of both models, in full and in a dry run."""


def measure(options: Options) -> None:
    """Train both models, unless they are there, and time all ways of each dtype."""
    configs = {"large": configure("large", options), "small": configure("small", options)}
    details = {}
    for name, config in configs.items():
        done = measure_run(config, options.runs / name, options.device, resume=True)
        details[f"perplexity_{name}"] = done["perplexity"]
    jobs = (
        Job(
            tuple(Cell(row, column, dtype, i) for row in rows_of(column) for i in range(PASSES)),
            partial(time_all, options, column, dtype, details),
        )
        for dtype in DTYPES
        for column in (*BATCH, MANY)
    )
    result = options.run(
        "decoding",
        jobs,
        kind="speed",
        title="Decoding of a trained GSA, greedily",
        setting="; ".join(f"{k}: {in_words(v, options.device)}" for k, v in configs.items()),
        unit="tokens/s",
        better="higher",
    )
    for entry in result.entries:
        if entry.group == "float32" and entry.details["same_tokens"] != 1:
            raise UserError(f"{entry.model}, {entry.column}: other tokens than {PLAIN}")


def rows_of(column: str) -> Sequence[str]:
    """Return the rows that have a number in a column."""
    return (BATCHES, TURNS) if column == MANY else (PLAIN, *DRAFTED)


def configure(name: str, options: Options) -> TrainConfig:
    """Return the training of one of the two models."""
    vocab_size = load_tokenizer(options.tokenizer).vocab_size
    sizes = replace(SIZES_OF[name][options.dry_run], data=options.text, vocab_size=vocab_size)
    config = train_config(f"decoding_{name}", sizes, "gsa")
    # The head is tied to the embedding: so few tokens cannot train another matrix.
    return replace(config, model=replace(config.model, tie_embeddings=True))


def time_all(
    options: Options, column: str, dtype: str, details: dict[str, float],
    cells: tuple[Cell, ...], folder: Path, device: torch.device,
) -> Iterator[list[Entry]]:  # fmt: skip
    """Decode in all ways of a column; yield the passes that are asked for."""
    large, small = (
        load_model(options.runs / name / "model", device=device)[0].to(DTYPES[dtype]).eval()
        for name in ("large", "small")
    )
    text = options.text.build(256, token_store())
    texts = next(iter(text.validation_batches(MANY_PROMPTS))).tokens.tolist()
    if column == MANY:
        ways = in_turn(large, texts, options.dry_run)
    else:
        rows = BATCH[column]
        prompts = [tokens[:128] for tokens in texts[: max(rows, LEAST_PROMPTS)]]
        ways = assisted(large, small, prompts, rows, 2 if options.dry_run else 512)
    expected = next(iter(ways.values()))()
    for row, way in ways.items():
        places = [cell for cell in cells if cell.model == row]
        with keep_graphs(large):
            if places:
                way()  # compiles kernels and captures graphs
            for cell in places:
                start = time.perf_counter()
                found = way()
                speed = sum(map(len, found)) / (time.perf_counter() - start)
                yield [cell.entry(speed, same_tokens=share_of_same(found, expected), **details)]


def assisted(
    large: LM, small: LM, prompts: list[list[int]], num_rows: int, count: int
) -> dict[str, Callable[[], list[list[int]]]]:
    """Return the ways to continue prompts by `count` tokens each, so many rows at a time."""
    plain = partial(in_batches, large, prompts, num_rows, max_new_tokens=count)
    drafted = {
        row: partial(plain, assistant=small, num_drafted=number) for row, number in DRAFTED.items()
    }
    return {PLAIN: plain, **drafted}


def in_batches(
    model: LM, prompts: list[list[int]], num_rows: int, **options: Any
) -> list[list[int]]:
    """Continue prompts, so many at a time."""
    parts = [prompts[i : i + num_rows] for i in range(0, len(prompts), num_rows)]
    return [row for part in parts for row in generate(model, part, **options)]


def in_turn(
    large: LM, texts: list[list[int]], is_toy: bool
) -> dict[str, Callable[[], list[list[int]]]]:
    """Return the ways to continue many prompts of 16 to 256 tokens, by 32 to 256 tokens each."""
    texts = texts[:3] if is_toy else texts
    num_rows, least, most = (2, 2, 6) if is_toy else (16, 32, 256)
    prompts = [text[: Random(i).randint(16, 256)] for i, text in enumerate(texts)]

    def stop(tokens: Sequence[int]) -> bool:
        return len(tokens) >= least + sum(tokens[:3]) * 7919 % (most - least + 1)

    told: dict[str, Any] = {"max_new_tokens": most, "stop": stop}
    return {
        BATCHES: partial(in_batches, large, prompts, num_rows, **told),
        TURNS: partial(generate, large, prompts, num_rows=num_rows, **told),
    }


def share_of_same(found: list[list[int]], expected: list[list[int]]) -> float:
    """Return the share of tokens that equal the expected ones."""
    pairs = [pair for rows in zip(found, expected, strict=True) for pair in zip_longest(*rows)]
    return sum(a == b for a, b in pairs) / len(pairs)


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, ROWS, trains=True))
