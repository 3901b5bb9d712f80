"""The command `demo`: a minute in which a paper's tiny model and attention learn from novels."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from mezzo_core.console import complain, show, show_table, write_continued
from mezzo_core.data import StreamDecoder, load_tokenizer
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.nn.generate import stream
from mezzo_core.paper import Demo, Paper
from mezzo_core.recipe_table import count_in_words
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.loop import TrainResult, train
from mezzo_core.train.stopping import StoppedError

PROMPT = "Elizabeth was "
SAMPLE_TOKENS = 300
EVAL_BATCHES = 20


def run_demo(paper: Paper, demo: Demo, out: Path | None) -> None:
    """Train the two models, and show a sample, both losses and what to try next.

    The folder `out` keeps both runs; None keeps nothing.

    Raises:
        UserError: as `train` does.
        typer.Exit: if the user stops it.
    """
    recipes = paper.recipes()
    with _folder(out) as folder:
        try:
            found = {  # runs that are kept go on, if they are the demo's
                name: train(_short(recipes[name](), demo), folder / name)
                for name in (demo.recipe, demo.attention)
            }
        except StoppedError as stop:
            complain("stopped")
            raise typer.Exit(stop.exit_code) from None
        _show_sample(folder / demo.recipe / "model")
        _show_losses(found, folder)
    show(
        f"\nA minute does not tell which model is better: `{paper.command} reproduce` shows what "
        "longer trainings with several seeds tell."
        f"\nNext: `{paper.command} recipes` lists all models;"
        f"\n  {paper.command} train {demo.recipe} --data YOUR_TEXT.txt --out runs/mine"
        f'\n  {paper.command} generate runs/mine --prompt "{PROMPT.strip()}"'
    )
    if out is not None:
        show(f"Both runs are in {out}.")


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Yield `out` or a temporary folder for the runs; the tokens are temporary in either case."""
    with ExitStack() as stack:
        made = Path(stack.enter_context(TemporaryDirectory()))
        told = os.environ.get("MEZZO_TOKENS")
        os.environ["MEZZO_TOKENS"] = str(made / "tokens")
        try:
            yield out or made
        finally:
            del os.environ["MEZZO_TOKENS"]
            if told is not None:
                os.environ["MEZZO_TOKENS"] = told


def _short(recipe: TrainConfig, demo: Demo) -> TrainConfig:
    return replace(
        recipe,
        steps=demo.steps,
        batch_size=demo.batch_size,
        micro_batch_size=None,
        eval_every=demo.steps,
        eval_batches=EVAL_BATCHES,
        checkpoint_every=demo.steps,
    )


def _show_sample(folder: Path) -> None:
    model, _, extra = load_model(folder)
    tokenizer = load_tokenizer(extra["tokenizer"])
    tokens = tokenizer.encode(PROMPT)
    steps = stream(model, [tokens], max_new_tokens=SAMPLE_TOKENS, temperature=0.8, seed=0)
    show(f"\nWhat {extra['name']} has learned to write, after the words {PROMPT.strip()!r}:\n")
    write_continued([PROMPT], [StreamDecoder(tokenizer, tokens)], steps)


def _show_losses(found: dict[str, TrainResult], folder: Path) -> None:
    rows = []
    for name, result in found.items():
        model, _, _ = load_model(folder / name / "model")
        loss = "" if result.val_loss is None else f"{result.val_loss:.3f}"
        weights = count_in_words(model.num_parameters())
        rows.append((name, weights, loss, f"{result.tokens_per_second:,.0f}"))
    show("")
    show_table(("model", "weights", "validation loss (nats a byte)", "tokens/s"), rows)
