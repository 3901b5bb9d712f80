"""The command line of a paper's package: train, generate, eval; bench and reproduce if it has them.

A package describes itself once (`Paper`) and gets its commands from `make_app`. `run` reports
errors that the user can fix in one line with exit code 2. Other errors keep their traceback.
"""

import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console

from mezzo_core.console import show, write_continued
from mezzo_core.data.mixture import TextConfig, change_texts
from mezzo_core.data.stream_decoder import StreamDecoder
from mezzo_core.device import choose_device
from mezzo_core.errors import UserError
from mezzo_core.eval.evaluate import evaluate
from mezzo_core.hub_commands import TaskOptions, add_hub_commands, measure_tasks
from mezzo_core.inputs import (
    check_writable,
    choose_texts,
    expanded,
    open_told_data,
    read_prompts,
    start_from,
    told_tokenizer,
)
from mezzo_core.nn.checkpoint import find_model, load_model
from mezzo_core.nn.generate import NO_NUMBERS, stream
from mezzo_core.options import (
    AllowPackage,
    Data,
    Device,
    InitFrom,
    Limit,
    NumFewshot,
    SkipBad,
    TaskFolder,
    Tasks,
    TextColumn,
    TokenizerName,
    TrainData,
    ValidationData,
)
from mezzo_core.train.distributed import launched_place
from mezzo_core.train.loop import train
from mezzo_core.train.recipes import Recipes, find_recipe
from mezzo_core.train.stopping import StoppedError

# click's error for wrong options and arguments. It is not imported from click, because typer may
# use a copy of its own.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


Answer = Callable[[Sequence[str] | None, str, Path], Any]
"""Takes the ids of tables and claims, the scale, and the folder of the report."""


@dataclass(frozen=True)
class Paper:
    """The description of a package from which its command line is made.

    Attributes:
        command: the program's name, such as "mezzo-rat".
        title: one line for the top of `--help`.
        recipes: the recipes by name.
        bench: function (device, quick, out) that measures speed and returns rows in the format of
            `mezzo_core.bench`; None leaves the command out.
        reproduce: function (ids, scale, out) that reproduces tables and claims; None leaves the
            command out.
        scales: the values of `--scale`, the default first; `reproduce` needs one.
    """

    command: str
    title: str
    recipes: Recipes
    bench: Callable[[torch.device, bool, Path | None], Any] | None = None
    reproduce: Answer | None = None
    scales: tuple[str, ...] = ()


def make_app(paper: Paper) -> typer.Typer:
    """Build the command line of one package."""
    app = typer.Typer(
        name=paper.command,
        help=paper.title,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )
    _add_train(app, paper)
    _add_generate(app)
    _add_eval(app)
    add_hub_commands(app)
    if paper.bench is not None:
        _add_bench(app, paper.bench)
    if paper.reproduce is not None:
        _add_reproduce(app, paper.reproduce, paper.scales)
    return app


def run(app: typer.Typer, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; a user's error is one line on stderr and exit code 2."""
    try:
        code = app(args=arguments, standalone_mode=False)
    except _USAGE_ERROR as error:
        if not (sys.argv[1:] if arguments is None else arguments):  # no arguments: show the help
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        _fail(error.format_message())  # type: ignore[attr-defined]
    except typer.Abort:
        sys.exit(1)
    except (UserError, OSError) as error:
        _fail(str(error))
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        whose = "the GPU" if isinstance(error, torch.OutOfMemoryError) else "this machine"
        options = "--seq-len, --batch-size, --micro-batch-size or --max-new-tokens"
        _fail(f"{whose}'s memory is full: a smaller model or a smaller {options} needs less")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    show(f"error: {' '.join(message.split())}", Console(stderr=True), style="red")
    sys.exit(2)


def _is_out_of_memory(error: Exception) -> bool:
    """Tell whether the memory is full. For a CPU torch has no error class, so look at the words."""
    words = ("DefaultCPUAllocator", "Storage size calculation overflowed")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        word in str(error) for word in words
    )


def _add_train(app: typer.Typer, paper: Paper) -> None:
    listing = ", ".join(paper.recipes)

    @app.command(name="train", help=f"Train a model by a recipe.\n\nRecipes: {listing}")
    def train_command(
        recipe: Annotated[str, typer.Argument(help="The recipe's name.")],
        data: TrainData = None,
        validation_data: ValidationData = None,
        text_column: TextColumn = None,
        skip_bad: SkipBad = None,
        tokenizer: TokenizerName = None,
        vocab_size: Annotated[
            int | None, typer.Option(help="The model's vocabulary, to fit another tokenizer.")
        ] = None,
        steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
        batch_size: Annotated[
            int | None, typer.Option(help="Sequences an optimizer step, over all processes.")
        ] = None,
        micro_batch_size: Annotated[
            int | None, typer.Option(help="Sequences at a time on a device; the rest accumulates.")
        ] = None,
        seq_len: Annotated[int | None, typer.Option(help="Tokens a sequence.")] = None,
        seed: Annotated[int | None, typer.Option(help="Seed of the initial weights.")] = None,
        init_from: InitFrom = None,
        out: Annotated[
            Path | None,
            typer.Option(help="Where the run is kept. Default: runs/RECIPE.", callback=expanded),
        ] = None,
        compile: Annotated[bool | None, typer.Option(help="Use torch.compile.")] = None,
        cuda_graph: Annotated[
            bool | None, typer.Option(help="Replay steps as CUDA graphs, for small models.")
        ] = None,
        track: Annotated[str | None, typer.Option(help="tensorboard or trackio.")] = None,
        fresh: Annotated[
            bool, typer.Option("--fresh", help="Start over instead of resuming what --out holds.")
        ] = False,
        new_data: Annotated[
            bool, typer.Option("--new-data", help="Go on even if the text has changed since.")
        ] = False,
        quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    ) -> None:
        config = find_recipe(paper.recipes, recipe)
        options = {
            "validation_source": validation_data,
            "text_column": text_column,
            "skip_bad": skip_bad,
            "tokenizer": tokenizer,
        }
        text = {name: value for name, value in options.items() if value is not None}
        if not isinstance(config.data, TextConfig) and (data or text):
            raise UserError(
                f"the recipe {recipe} reads no text: --data, --tokenizer and their like do not fit"
            )
        if init_from is not None:
            config = start_from(config, init_from, tokenizer)
        if isinstance(config.data, TextConfig):
            chosen = change_texts(config.data, **text)
            config = replace(config, data=choose_texts(chosen, data) if data else chosen)
        with _values_of_the_user():
            config = _override(
                config,
                model=_override(config.model, vocab_size=vocab_size),
                steps=steps,
                batch_size=batch_size,
                micro_batch_size=micro_batch_size,
                seq_len=seq_len,
                seed=seed,
                compile=compile,
                cuda_graph=cuda_graph,
                track=track,
            )
        folder = out or Path("runs") / recipe
        is_first = launched_place().rank == 0  # only one of torchrun's processes prints results
        try:
            result = train(config, folder, resume=not fresh, new_data=new_data, quiet=quiet)
        except StoppedError as stop:
            if is_first:
                show(f"{recipe}: {stop}", Console(stderr=True))
            raise typer.Exit(stop.exit_code) from None
        if is_first and result.val_perplexity is not None:
            show(
                f"{recipe}: validation perplexity {result.val_perplexity:.3f} after "
                f"{result.steps} steps; the model is in {result.out / 'model'}"
            )


def _add_generate(app: typer.Typer) -> None:
    @app.command()
    def generate(
        run: Annotated[Path, typer.Argument(help="A training run's folder, or its model/.")],
        prompt: Annotated[
            list[str] | None, typer.Option(help="Text to continue; repeat for several.")
        ] = None,
        max_new_tokens: Annotated[
            int, typer.Option(min=1, max=2**31 - 1, help="Tokens to write.")
        ] = 200,
        temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
        top_k: Annotated[
            int | None, typer.Option(min=1, help="Only the k likeliest tokens.")
        ] = None,
        top_p: Annotated[float | None, typer.Option(help="Only the likeliest mass p.")] = None,
        seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
        prefill_tokens: Annotated[
            int | None, typer.Option(min=1, help="Prompt tokens at a time, for bounded memory.")
        ] = None,
        tokenizer: TokenizerName = None,
        device: Device = None,
        allow_package: AllowPackage = None,
    ) -> None:
        """Continue a text with a trained model, printed as it is written."""
        folder, chosen = find_model(run), _device(device)
        texts = read_prompts(prompt)
        model, _, extra = load_model(folder, device=chosen, allow_packages=allow_package or ())
        kept = told_tokenizer(extra, folder, model.vocab_size, tokenizer)
        tokens = [kept.encode(text) for text in texts]
        if not all(tokens):
            raise UserError("the prompt is empty: give --prompt TEXT, or text on standard input")
        prompts = [[*kept.begin_tokens, *row] for row in tokens]
        if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack a model's characters
            sys.stdout.reconfigure(errors="replace")
        with _values_of_the_user():
            steps = stream(
                model,
                prompts,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                stop_tokens=[t for t in kept.stop_tokens if t < model.vocab_size],
                seed=seed,
                prefill_tokens=prefill_tokens,
            )
            write_continued(texts, [StreamDecoder(kept, tokens) for tokens in prompts], steps)


def _add_eval(app: typer.Typer) -> None:
    @app.command(name="eval")
    def eval_command(
        run: Annotated[Path, typer.Argument(help="A training run's folder, or its model/.")],
        data: Data = None,
        text_column: TextColumn = None,
        skip_bad: SkipBad = None,
        whole: Annotated[bool, typer.Option("--all", help="All of the text, not a part.")] = False,
        batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 8,
        seq_len: Annotated[
            int | None, typer.Option(min=1, help="Tokens a sequence. Default: as trained.")
        ] = None,
        segment_tokens: Annotated[
            int | None, typer.Option(min=1, help="Tokens of a row at a time, for bounded memory.")
        ] = None,
        tasks: Tasks = None,
        task_folder: TaskFolder = None,
        num_fewshot: NumFewshot = None,
        limit: Limit = None,
        tokenizer: TokenizerName = None,
        device: Device = None,
        allow_package: AllowPackage = None,
    ) -> None:
        """Measure perplexity and accuracy on held-out text, or what `--tasks` of lm-eval ask.

        The text is the validation part of `--data`.
        """
        folder, chosen, allowed = find_model(run), _device(device), allow_package or ()
        model, _, extra = load_model(folder, device=chosen, allow_packages=allowed)
        if tasks is not None:
            kept = told_tokenizer(extra, folder, model.vocab_size, tokenizer)
            asked = TaskOptions(tasks, task_folder, num_fewshot, limit, batch_size, seq_len)
            found = {"run": str(run), **measure_tasks(model, kept, asked)}
            Console().print_json(json.dumps(found, allow_nan=False), ensure_ascii=True)
            return
        how: dict[str, Any] = {"text_column": text_column, "skip_bad": skip_bad, "whole": whole}
        name, rows = open_told_data(
            extra, folder, model.vocab_size, data, tokenizer, seq_len, allowed, **how
        )
        with _values_of_the_user():
            result = evaluate(
                model,
                rows.validation_batches(batch_size),
                num_bytes=rows.num_validation_bytes,
                segment_tokens=segment_tokens,
            )
        if not math.isfinite(result.loss):
            raise UserError(f"{folder}: {NO_NUMBERS}")
        found = {
            "run": str(run),
            "data": name,
            "tokens": result.tokens,
            "loss": result.loss,
            "perplexity": result.perplexity if math.isfinite(result.perplexity) else None,
            "bits_per_byte": result.bits_per_byte,
            "accuracy": result.accuracy,
        }
        Console().print_json(json.dumps(found, allow_nan=False), ensure_ascii=True)


def _add_bench(app: typer.Typer, measure: Callable[[torch.device, bool, Path | None], Any]) -> None:
    @app.command()
    def bench(
        device: Device = None,
        quick: Annotated[bool, typer.Option("--quick", help="Tiny shapes, seconds.")] = False,
        out: Annotated[
            Path | None, typer.Option(help="Append rows to this .jsonl file.", callback=expanded)
        ] = None,
    ) -> None:
        """Measure speed and memory on this machine; every op is checked before it is timed."""
        chosen = _device(device)
        if out is not None:
            check_writable(out, is_folder=False)
        measure(chosen, quick, out)


def _add_reproduce(app: typer.Typer, answer: Answer, scales: tuple[str, ...]) -> None:
    first, told, reports = scales[0], ", ".join(scales), Path("reports")

    @app.command()
    def reproduce(
        ids: Annotated[
            list[str] | None, typer.Argument(help="Tables and claims; all of them by default.")
        ] = None,
        scale: Annotated[str, typer.Option(help=f"How much to run: {told}.")] = first,
        out: Annotated[
            Path, typer.Option(help="Where the report goes.", callback=expanded)
        ] = reports,
    ) -> None:
        """Rerun the paper's tables and claims, and write a report beside its numbers."""
        if scale not in scales:
            raise UserError(f"--scale takes {told}, got {scale!r}")
        check_writable(out, is_folder=True)
        answer(ids, scale, out)


@contextmanager
def _values_of_the_user() -> Iterator[None]:
    """Turn a ValueError about an option's value into a `UserError`."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def _override(config: Any, **options: Any) -> Any:
    given = {name: value for name, value in options.items() if value is not None}
    return replace(config, **given) if given else config


def _device(name: str | None) -> torch.device:
    try:
        return choose_device(name, None)
    except UserError as error:
        raise UserError(f"--device {name}: {error}") from None
