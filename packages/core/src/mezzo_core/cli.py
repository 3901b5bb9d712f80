"""The command line of a paper's package: train, generate, eval and others.

A package describes itself once (`Paper`) and gets its commands from `make_app`. `run` reports
errors that the user can fix in one line with exit code 2. Other errors keep their traceback.

Nothing here imports torch before a command needs it: help and mistyped words are answered at once.
"""

import io
import json
import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from mezzo_core import __version__
from mezzo_core.console import show, write_continued
from mezzo_core.errors import UserError
from mezzo_core.hub_commands import TaskOptions, add_hub_commands, measure_tasks
from mezzo_core.lazy_commands import add_lazy_commands
from mezzo_core.options import (
    AllowPackage,
    Data,
    Device,
    Limit,
    NumFewshot,
    SkipBad,
    TaskFolder,
    Tasks,
    TextColumn,
    TokenizerName,
)
from mezzo_core.paper import Bench
from mezzo_core.paper import Demo as Demo
from mezzo_core.paper import Paper as Paper
from mezzo_core.paths import check_writable, expanded
from mezzo_core.recipe_commands import add_recipe_commands
from mezzo_core.train.command import make_command

if TYPE_CHECKING:
    import torch

    from mezzo_core.reproduction.reproduce import Reproduction

# click's error for wrong options and arguments. It is not imported from click, because typer may
# use a copy of its own.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


def make_app(paper: Paper) -> typer.Typer:
    """Build the command line of one package."""
    app = typer.Typer(
        name=paper.command,
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )
    _add_version(app, paper)
    if paper.demo is not None:
        _add_demo(app, paper, paper.demo)
    app.command(name="train")(make_command(paper))
    _add_generate(app)
    _add_eval(app)
    add_hub_commands(app)
    add_recipe_commands(app, paper)
    if paper.bench is not None:
        _add_bench(app, paper.bench)
    if paper.reproduction is not None:
        _add_reproduce(app, paper.reproduction)
    add_lazy_commands(app, paper.commands)
    return app


def run(app: typer.Typer, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; a user's error is one line on stderr and exit code 2."""
    try:
        code = app(args=arguments, prog_name=app.info.name or None, standalone_mode=False)
    except _USAGE_ERROR as error:
        if not (sys.argv[1:] if arguments is None else arguments):  # no arguments: show the help
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        _fail(error.format_message())  # type: ignore[attr-defined]
    except typer.Abort:
        sys.exit(1)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mezzo_"):
            raise
        _fail(
            f"the commands need the package {error.name}: pip install '{app.info.name}[train]' "
            "brings it"
        )
    except (UserError, OSError) as error:
        _fail(str(error))
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        import torch

        whose = "the GPU" if isinstance(error, torch.OutOfMemoryError) else "this machine"
        options = "--seq-len, --batch-size, --micro-batch-size or --max-new-tokens"
        _fail(f"{whose}'s memory is full: a smaller model or a smaller {options} needs less")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    show(f"error: {' '.join(message.split())}", Console(stderr=True), style="red")
    sys.exit(2)


def _is_out_of_memory(error: Exception) -> bool:
    """Tell whether the memory is full. For a CPU torch has no error class, so look at the words."""
    import torch

    words = ("DefaultCPUAllocator", "Storage size calculation overflowed")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        word in str(error) for word in words
    )


def _add_version(app: typer.Typer, paper: Paper) -> None:
    def tell(asked: bool) -> None:
        if asked:
            try:
                torch_version = version("torch")
            except PackageNotFoundError:
                torch_version = "not installed"
            show(
                f"{paper.command} {paper.version}, mezzo-core {__version__}, "
                f"torch {torch_version}, Python {platform.python_version()}"
            )
            raise typer.Exit

    @app.callback(help=paper.title)
    def main(
        version: Annotated[
            bool,
            typer.Option("--version", callback=tell, is_eager=True, help="Show the versions."),
        ] = False,
    ) -> None: ...


def _add_demo(app: typer.Typer, paper: Paper, plan: Demo) -> None:
    @app.command()
    def demo(
        steps: Annotated[
            int, typer.Option(min=1, max=2**31 - 1, help="Optimizer steps of each model.")
        ] = plan.steps,
        out: Annotated[
            Path | None,
            typer.Option(
                help="Keep both runs in this folder. Default: nothing.", callback=expanded
            ),
        ] = None,
    ) -> None:
        """In a minute: train the paper's tiny model and attention on novels, and see both."""
        from mezzo_core.train.demo import run_demo

        if out is not None:
            check_writable(out, is_folder=True)
        run_demo(paper, plan._replace(steps=steps), out)


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
        from mezzo_core.data.stream_decoder import StreamDecoder
        from mezzo_core.inputs import read_prompts, told_tokenizer
        from mezzo_core.nn.checkpoint import find_model, load_model
        from mezzo_core.nn.generate import stream

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
        """Measure perplexity and accuracy on held-out text, or what `--tasks` ask.

        The text is the validation part of `--data`.
        """
        from mezzo_core.eval.evaluate import evaluate
        from mezzo_core.inputs import open_told_data, told_tokenizer
        from mezzo_core.nn.checkpoint import find_model, load_model
        from mezzo_core.nn.ends import NO_NUMBERS

        folder, chosen, allowed = find_model(run), _device(device), allow_package or ()
        model, _, extra = load_model(folder, device=chosen, allow_packages=allowed)
        if tasks is not None:
            kept = told_tokenizer(extra, folder, model.vocab_size, tokenizer)
            asked = TaskOptions(
                tasks, task_folder, num_fewshot, limit, batch_size, seq_len, segment_tokens
            )
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


def _add_bench(app: typer.Typer, load: Callable[[], Bench]) -> None:
    @app.command()
    def bench(
        device: Device = None,
        quick: Annotated[bool, typer.Option("--quick", help="Toy sizes, seconds.")] = False,
        out: Annotated[
            Path | None, typer.Option(help="Folder of the result files.", callback=expanded)
        ] = None,
    ) -> None:
        """Measure the paper's speeds at this machine's sizes; what is wrong has no speed.

        A folder goes on where it was left.
        """
        chosen = _device(device)
        if out is not None:
            check_writable(out, is_folder=True)
        load()(chosen, quick, out)


def _add_reproduce(app: typer.Typer, load: "Callable[[], Reproduction]") -> None:
    @app.command()
    def reproduce(
        ids: Annotated[
            list[str] | None, typer.Argument(help="Tables and claims; all of them by default.")
        ] = None,
        scale: Annotated[
            str | None,
            typer.Option(help="How much to run: cpu (the default), smoke, for some papers gpu."),
        ] = None,
        out: Annotated[Path, typer.Option(help="Where the report goes.", callback=expanded)] = Path(
            "reports"
        ),
    ) -> None:
        """Rerun the paper's tables and claims, and write a report beside its numbers."""
        paper = load()
        scale = scale or next(iter(paper.scales))
        if scale not in paper.scales:
            raise UserError(f"--scale takes {', '.join(paper.scales)}, got {scale!r}")
        check_writable(out, is_folder=True)
        paper.reproduce(ids, scale, out)


@contextmanager
def _values_of_the_user() -> Iterator[None]:
    """Turn a ValueError about an option's value into a `UserError`."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def _device(name: str | None) -> "torch.device":
    from mezzo_core.device import choose_device

    try:
        return choose_device(name, None)
    except UserError as error:
        raise UserError(f"--device {name}: {error}") from None
