"""The command line of a paper's package: train, generate, eval and others.

A package describes itself once (`Paper`) and gets its commands from `make_app`. `run` reports
errors that the user can fix in one line with exit code 2. Other errors keep their traceback.

Nothing here imports torch before a command needs it: help and mistyped words are answered at once.
"""

import json
import math
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from mezzo_core import __version__
from mezzo_core.console import complain, show
from mezzo_core.errors import UserError, values_of_the_user
from mezzo_core.generate_command import add_generate
from mezzo_core.hub_commands import TaskOptions, add_hub_commands, measure_tasks
from mezzo_core.options import (
    AllowPackage,
    Data,
    Device,
    Limit,
    Longbench,
    NumFewshot,
    SkipBad,
    TaskFolder,
    Tasks,
    TestedAnswers,
    TextColumn,
    TokenizerName,
)
from mezzo_core.paper import Bench
from mezzo_core.paper import Demo as Demo
from mezzo_core.paper import Paper as Paper
from mezzo_core.paths import check_writable, expanded
from mezzo_core.recipe_commands import add_recipe_commands
from mezzo_core.train.command import make_command
from mezzo_core.train.stopping import StoppedError

if TYPE_CHECKING:
    from mezzo_core.reproduction.reproduce import Reproduction

# click's error for wrong options and arguments. It is not imported from click, because typer may
# use a copy of its own.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
_NAMED_ONCE = ("--sft", "--validation-data", "--init-from", "--longbench")
"""Options of which click would read the last alone, where a user may expect all to be read."""


class _Commands(TyperGroup):
    """Reports where a training stands when a signal has stopped it, in any command."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except StoppedError as stop:
            from mezzo_core.train.distributed import launched_place

            if launched_place().rank == 0:  # one of torchrun's processes
                complain(str(stop))
            raise typer.Exit(stop.exit_code) from None


def make_app(paper: Paper) -> typer.Typer:
    """Build the command line of one package."""
    app = typer.Typer(
        cls=_Commands,
        name=paper.command,
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )
    _add_version(app, paper)
    if paper.demo is not None:
        _add_demo(app, paper, paper.demo)
    app.command(name="train")(make_command(paper))
    add_generate(app)
    _add_eval(app)
    add_hub_commands(app, paper)
    add_recipe_commands(app, paper)
    if paper.bench is not None:
        _add_bench(app, paper.bench)
    if paper.reproduction is not None:
        _add_reproduce(app, paper.reproduction)
    for name, command in paper.commands.items():
        app.command(name)(command)
    return app


def run(app: typer.Typer, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; a user's error is one line on stderr and exit code 2."""
    given = sys.argv[1:] if arguments is None else arguments
    if "--out=" in given or ("--out", "") in pairwise(given):  # an unset variable of a shell
        _fail("--out must name a folder, got ''")
    for option in (*_NAMED_ONCE, *(["--data"] if "eval" in given[:1] else [])):
        if sum(word.partition("=")[0] == option for word in given) > 1:
            _fail(f"{option} is given more than once, and can name one place only")
    try:
        code = app(args=arguments, prog_name=app.info.name or None, standalone_mode=False)
    except _USAGE_ERROR as error:
        if not given:  # show the help
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
    complain(f"error: {' '.join(message.split())}", style="red")
    sys.exit(2)


def _is_out_of_memory(error: Exception) -> bool:
    """Tell whether the memory is full; for a CPU torch has no error class, only words."""
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
        """In a minute: train a tiny model and attention on novels, and see both."""
        from mezzo_core.train.demo import run_demo

        if out is not None:
            check_writable(out, is_folder=True)
        run_demo(paper, plan._replace(steps=steps), out)


def _add_eval(app: typer.Typer) -> None:
    @app.command(name="eval")
    def eval_command(
        run: Annotated[Path, typer.Argument(help="A training run's folder, or its model/.")],
        data: Data = None,
        sft: TestedAnswers = None,
        text_column: TextColumn = None,
        skip_bad: SkipBad = None,
        whole: Annotated[bool, typer.Option("--all", help="Also what was trained on.")] = False,
        batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 8,
        seq_len: Annotated[
            int | None,
            typer.Option(
                min=1,
                help="Tokens a sequence. Default: as trained; 4096 for ruler and --longbench.",
            ),
        ] = None,
        segment_tokens: Annotated[
            int | None, typer.Option(min=1, help="Tokens of a row at a time, for bounded memory.")
        ] = None,
        tasks: Tasks = None,
        longbench: Longbench = None,
        task_folder: TaskFolder = None,
        num_fewshot: NumFewshot = None,
        limit: Limit = None,
        tokenizer: TokenizerName = None,
        device: Device = None,
        allow_package: AllowPackage = None,
    ) -> None:
        """Measure perplexity and accuracy on held-out text, or the score of tasks.

        The text is the validation part of `--data`, or the answers in that of `--sft`.
        """
        from mezzo_core.device import told_device
        from mezzo_core.eval.evaluate import evaluate
        from mezzo_core.inputs import open_told_data, told_tokenizer
        from mezzo_core.nn.checkpoint import find_model, load_model
        from mezzo_core.nn.ends import NO_NUMBERS

        asks = tasks is not None or longbench is not None
        if asks:
            of_texts = {"text_column": text_column, "skip_bad": skip_bad, "all": whole}
            _refuse("goes without --tasks and --longbench", data=data, sft=sft, **of_texts)
        else:
            _refuse("goes with --tasks or --longbench", limit=limit)
        if tasks is None:
            _refuse("goes with --tasks", task_folder=task_folder, num_fewshot=num_fewshot)
        if sft is not None:
            _refuse("goes without --sft", data=data)
        folder, chosen, allowed = find_model(run), told_device(device), allow_package or ()
        model, _, extra = load_model(folder, device=chosen, allow_packages=allowed)
        if asks:
            kept = told_tokenizer(extra, folder, model.vocab_size, tokenizer)
            asked = TaskOptions(
                tasks, longbench, task_folder, num_fewshot, limit, batch_size, seq_len,
                segment_tokens,
            )  # fmt: skip
            with values_of_the_user():  # some models cannot decode
                found = {"run": str(run), **measure_tasks(model, kept, asked)}
            Console().print_json(json.dumps(found, allow_nan=False), ensure_ascii=True)
            return
        how: dict[str, Any] = {"text_column": text_column, "skip_bad": skip_bad, "whole": whole}
        name, rows = open_told_data(
            extra, folder, model.vocab_size, data if sft is None else sft, tokenizer, seq_len,
            allowed, answers=sft is not None, **how,
        )  # fmt: skip
        with values_of_the_user():
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


def _refuse(why: str, **options: Any) -> None:
    """Refuse options that would change nothing, if any is given."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise UserError(f"--{name.replace('_', '-')} {why}")


def _add_bench(app: typer.Typer, load: Callable[[], Bench]) -> None:
    @app.command()
    def bench(
        device: Device = None,
        quick: Annotated[bool, typer.Option("--quick", help="Toy sizes, seconds.")] = False,
        out: Annotated[
            Path | None, typer.Option(help="Folder of the result files.", callback=expanded)
        ] = None,
        only: Annotated[
            list[str] | None, typer.Option(help="A table or a model; again for several.")
        ] = None,
    ) -> None:
        """Measure the paper's speeds: on a GPU at the paper's sizes.

        A folder goes on where it was left.
        """
        from mezzo_core.device import told_device

        chosen = told_device(device)
        if out is not None:
            check_writable(out, is_folder=True)
        load()(chosen, quick, out, only or ())
        if out is not None:
            show(f"the results are in {out}")


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
        out: Annotated[
            Path,
            typer.Option(help="Where the report goes, in place of an older.", callback=expanded),
        ] = Path("reports"),
    ) -> None:
        """Rerun the paper's tables and claims, and write a report beside its numbers."""
        paper = load()
        from mezzo_core.reproduction.reproduce import reproduce_papers

        scale = scale or next(iter(paper.scales))
        if scale not in paper.scales:
            raise UserError(f"--scale takes {', '.join(paper.scales)}, got {scale!r}")
        check_writable(out, is_folder=True)
        reproduce_papers([paper], ids, scale, out)
