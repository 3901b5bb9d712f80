"""Train models of 200M weights on a billion tokens each: perplexity, recall, speed and memory.

    python packages/core/experiments/corpus/build.py --out corpus
    python packages/core/experiments/train_200m.py --data corpus --tokenizer mistral-v1.model \
        --seeds 0 --out packages/core/results/nvidia-h200
    python packages/core/experiments/train_200m.py --out DIR --dry-run      # toy sizes, on a CPU

All GPUs train one model after another. `--jobs 4 --tokens 400` trains four models at a time, each
on one GPU, with 400 million tokens. A training that was killed goes on from its last checkpoint in
the scratch folder, and repeats a tenth of its steps at most; what has ended is not repeated, so
`--models` can be trained on different days. Writes train_200m.json, and of the same models
recall_200m.json: the accuracy on pairs of tokens that were seen before, by how long before, and the
perplexity of all other targets.

All models have the optimizer of the paper's recipe, whose rate is 6e-4. At C 640, by
train_six, 1e-3 was the best of three rates for attention, RAT(L=16) and its hybrid, and as good as
the best for the RNN; at C 384 GSA's best was next to it. A rate falls with the width.

Criteria, written before the run. By train_six the seeds of a model differ by 0.2 to 1.8% in
perplexity. So a model is better than another if its perplexity is lower by 3%, its recall higher by
2 points, its needles by 15 points (of 100 questions), its speed by 10%; and it is not worse if the
other is not better. Of the papers' claims:

- RAT(L=16)'s perplexity is not worse than attention's, and its speed is better.
- Its hybrid's perplexity is better than attention's, and its speed is not worse.
- RAT(L=16)'s recall is better than that of the better RNN, and its perplexity is not worse.
- GSA's perplexity is better than that of the better RNN, and not worse than attention's.

A claim holds if all of it does, and fails if the opposite of a part is found; else it is not
settled. Scores of needles decide nothing.

Why RAT(L=16) alone is worse than attention on source code (written after train_200m's first run,
before recall_200m's): for lack of recall, if the perplexity of the other targets is not worse. Then
what it lacks is near if its recall is lower by 5 points from 16 to 1,023 tokens before, and far if
it is from 1,024 on; within a chunk of 16 it should not lack any.

What recall windows and slots bring (written after recall_200m's rows of attention and RAT(L=16),
before those of the hybrid and GSA): the hybrid lacks none below 1,024 tokens, its windows, and
lacks some beyond; GSA, whose state has a fixed size, lacks it at every distance from 16 on.

recall_200m_again.json is the same command once more, into another folder. RAT repeats in every
digit. Attention by PyTorch's fused kernel does not, and differed by 6% in perplexity: after 130
million tokens its losses fall steeply. So one seed tells no smaller difference from attention here.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from mezzo_core.data import NO_TARGET, Batch, load_tokenizer
from mezzo_core.data.tokenized_corpus import token_store
from mezzo_core.eval.evaluate import Evaluation, evaluate
from mezzo_core.eval.ruler import TASKS, Found, Task, measure_ruler
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.nn.lm import LM
from mezzo_core.reproduction import Cell, Entry, Options, run_script
from mezzo_core.reproduction.gpus import run_processes
from mezzo_core.reproduction.runner import Job
from mezzo_core.reproduction.training import in_words, measure_run
from mezzo_core.train.config import TrainConfig
from mezzo_gsa import GSAConfig
from mezzo_rat.recipes import paper_200m, tiny, train_config
from torch import Tensor

GSA = "GSA"
MODELS = {
    "RAT(L=16)": "rat_l16",
    "RAT(L=16)-SWA": "rat_swa",
    "Attention": "attention",
    "RNN": "rnn",
    "RNN, started as RAT(L=16)": "rnn_span16",
    GSA: "attention",
}
"""The recipe of each model; GSA takes attention's place in it."""
T, BATCH = 4096, 64
FULL = replace(paper_200m(T), batch_size=BATCH, eval_batches=None, keep_checkpoints=1)
DRY = replace(
    tiny(), d_model=32, num_layers=2, head_dim=8, seq_len=128, batch_size=2, steps=2, eval_batches=1
)
HELD_OUT = 0.01
"""Share of the text on which models are tested: four million tokens."""
PERPLEXITY, SPEED, PEAK = "Val. PPL", "tokens/s of a GPU", "peak GB of a GPU"
RECALL = "recall, %"
OTHERS = "PPL of other targets"
DISTANCES = {
    "1 to 15 before, %": (1, 16),
    "16 to 127, %": (16, 128),
    "128 to 1,023, %": (128, 1024),
    "1,024 or more, %": (1024, T),
}
"""Tokens since a pair was last seen: at least, and below."""
NEEDLES = {
    "needle in noise, %": TASKS["ruler_niah_single_1"],
    "needle in prose, %": TASKS["ruler_niah_single_2"],
    "one of four needles, %": TASKS["ruler_niah_multikey_1"],
}


def measure(options: Options) -> None:
    """Train one model after another."""
    configs = configure(options)
    first = next(iter(configs.values()))
    needles, length, questions, distances = NEEDLES, T, 100, DISTANCES
    if options.dry_run:
        distances = dict.fromkeys(DISTANCES, (1, first.seq_len))
        needles = {column: replace(task, max_new_tokens=1) for column, task in NEEDLES.items()}
        length, questions = 1024, 1
    tokenizer = load_tokenizer(options.tokenizer)
    ask = partial(measure_ruler, tokenizer=tokenizer, length=length, num_questions=questions)
    folder = options.runs / "train_200m"

    def jobs(columns: Iterable[str], work: Callable[..., Any], *arguments: Any) -> list[Job]:
        return [
            Job(
                tuple(Cell(m, c, seed=seed) for c in columns),
                partial(work, replace(config, seed=seed), folder, *arguments),
            )
            for seed, (m, config) in product(options.seeds, configs.items())
        ]

    options.run(
        "train_200m",
        jobs((PERPLEXITY, SPEED, PEAK, RECALL, *needles), train, needles, ask),
        title="Models of 200M weights, trained on source code and manuals",
        setting=f"{in_words(first, options.device)}; recall: accuracy on targets that end a pair "
        f"of tokens which no other row has, and this one last {first.seq_len // 4} or more tokens "
        f"before; needles: RULER's, {questions} questions of {length} tokens",
        unit="",
    )
    options.run(
        "recall_200m",
        jobs((*distances, OTHERS), recall, distances),
        title="What models of 200M weights recall, by distance",
        setting=f"{in_words(first, options.device)}; accuracy on targets that end a pair of tokens "
        "which no other row has, by the tokens since it was last seen; and the perplexity of all "
        "targets that end no such pair",
        unit="",
    )


def configure(options: Options) -> dict[str, TrainConfig]:
    """Return the runs of all models."""
    vocab_size = load_tokenizer(options.tokenizer).vocab_size
    shared = replace(DRY, data=options.text, vocab_size=vocab_size)
    if not options.dry_run:
        steps = options.tokens * 10**6 // (T * BATCH)
        tenth = max(1, steps // 10)
        shared = replace(
            FULL,
            data=replace(options.text, validation_fraction=HELD_OUT),
            vocab_size=vocab_size,
            steps=steps,
            eval_every=tenth,
            checkpoint_every=tenth,
        )
    configs = {m: train_config(f"200m_{name}", shared, name) for m, name in MODELS.items()}
    slots = (GSAConfig(num_heads=4, num_slots=64),) * shared.num_layers
    gsa = configs[GSA]
    return configs | {GSA: replace(gsa, name="200m_gsa", model=replace(gsa.model, mixers=slots))}


def train(
    config: TrainConfig,
    folder: Path,
    needles: Mapping[str, Task],
    ask: Callable[..., Found],
    cells: tuple[Cell, ...],
    _: Path,
    device: torch.device,
) -> Iterator[list[Entry]]:
    """Yield the numbers from a training's log, then those of tests of its model.

    The training has all GPUs, or that of its job if there are several at a time.
    """
    folder = run_folder(config, folder)
    work, count = partial(measure_run, resume=True), 1
    if device == torch.device("cuda"):
        count = torch.cuda.device_count()
        by_rank = run_processes(count, work, config, folder, device)
    else:
        by_rank = {0: work(config, folder, device)}
    found = by_rank[0]
    values = {
        PERPLEXITY: found.pop("perplexity"),
        SPEED: found["tokens_per_second"] / count,
        PEAK: max(each["peak_gb"] or 0 for each in by_rank.values()),
    }
    if told := [cell for cell in cells if cell.column in values]:
        yield [c.entry(values[c.column], **(found if c.column == PERPLEXITY else {})) for c in told]
    model = load_model(folder / "model", device=device)[0]
    for cell in cells:
        if cell.column == RECALL:
            tokens, targets = held_out(config)
            seen = recalled(tokens, targets, config.seq_len // 4, config.seq_len)
            yield [cell.entry(100 * score(model, config, tokens, seen).accuracy)]
        elif cell.column in needles:
            yield [cell.entry(ask(model, task=needles[cell.column]).score)]


def recall(
    config: TrainConfig,
    folder: Path,
    distances: Mapping[str, tuple[int, int]],
    cells: tuple[Cell, ...],
    _: Path,
    device: torch.device,
) -> Iterator[list[Entry]]:
    """Yield what a trained model recalls of its context, by distance."""
    model = load_model(run_folder(config, folder) / "model", device=device)[0]
    tokens, targets = held_out(config)
    for cell in cells:
        if cell.column == OTHERS:
            seen = recalled(tokens, targets, 1, config.seq_len)
            others = targets.where(seen == NO_TARGET, NO_TARGET)
            yield [cell.entry(score(model, config, tokens, others).perplexity)]
        else:
            seen = recalled(tokens, targets, *distances[cell.column])
            yield [cell.entry(100 * score(model, config, tokens, seen).accuracy)]


def run_folder(config: TrainConfig, folder: Path) -> Path:
    """Return where a run is kept: a killed one goes on, and an ended one is measured again."""
    return folder / f"{config.name}_{config.steps}_{config.seed}"


def held_out(config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Return the tokens and targets of the held-out part."""
    text = config.data.build(config.seq_len, token_store())
    size = config.micro_batch_size or config.batch_size
    batches = [*islice(text.validation_batches(size), config.eval_batches)]
    tokens, targets = (torch.cat([getattr(b, of) for b in batches]) for of in ("tokens", "targets"))
    return tokens, targets


def score(model: LM, config: TrainConfig, tokens: Tensor, targets: Tensor) -> Evaluation:
    """Evaluate a model on targets; some may be left out."""
    size = config.micro_batch_size or config.batch_size
    rows = map(Batch, tokens.split(size), targets.split(size))
    return evaluate(model, rows, precision=config.precision)


def recalled(tokens: Tensor, targets: Tensor, least: int, below: int) -> Tensor:
    """Keep the targets that end a pair of tokens which no other row has, and this one has before.

    The pair last came `least` tokens before, or more, but fewer than `below`. So the context tells
    the target: a pair that is so rare was hardly learned (Arora et al., "Zoology", 2023, section
    3.1).
    """
    pairs = tokens << 32 | targets
    places = pairs.argsort(dim=1, stable=True)
    again = pairs.gather(1, places).diff(dim=1) == 0
    since = torch.zeros_like(places).scatter(1, places[:, 1:], places.diff(dim=1) * again)
    each, number = pairs.unique(return_inverse=True)
    row = torch.arange(len(pairs))[:, None].expand_as(pairs).flatten()
    first, last = (
        torch.zeros_like(each).scatter_reduce(0, number.flatten(), row, how, include_self=False)
        for how in ("amin", "amax")
    )
    is_near = (since >= least) & (since < below)
    return targets.where(is_near & (first == last)[number], NO_TARGET)


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, tuple(MODELS), trains=True, parallel=True, tokens=1000))
