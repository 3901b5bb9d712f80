"""The commands that use other libraries: `export`, `import` and `eval --tasks`."""

import logging
import math
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

from mezzo_core.console import show
from mezzo_core.errors import UserError, nearest
from mezzo_core.libraries import import_library, library_errors
from mezzo_core.options import AllowPackage, TokenizerName
from mezzo_core.paper import Paper
from mezzo_core.paths import check_writable, expanded

if TYPE_CHECKING:
    from mezzo_core.data.tokenizers import Tokenizer
    from mezzo_core.eval.longbench.measure import Question
    from mezzo_core.nn.lm import LM


class TaskOptions(NamedTuple):
    """Options of `eval --tasks` and `--longbench`."""

    tasks: str | None
    longbench: Path | None
    folder: Path | None
    num_fewshot: int | None
    limit: int | None
    batch_size: int
    max_length: int | None
    segment_tokens: int | None

    def names(self) -> list[str]:
        """Return the names of the tasks; "ruler" is all of RULER's.

        Raises:
            UserError: if there is none.
        """
        if self.tasks is None:
            return []
        names = [name for name in map(str.strip, self.tasks.split(",")) if name]
        if not names:
            raise UserError("--tasks must name a task, or several with commas between them")
        if "ruler" not in names:
            return names
        from mezzo_core.eval.ruler import TASKS

        return [each for name in names for each in (TASKS if name == "ruler" else (name,))]


def add_hub_commands(app: typer.Typer, paper: Paper) -> None:
    """Add the commands; their libraries are imported when they run."""

    @app.command(name="export")
    def export_command(
        run: Annotated[Path, typer.Argument(help="A training run's folder, or its model/.")],
        out: Annotated[Path, typer.Argument(help="A new folder.", callback=expanded)],
        tokenizer: TokenizerName = None,
        layout: Annotated[
            str | None,
            typer.Option(
                help=f"Write it as another library does: {', '.join(paper.layouts)}.",
                hidden=not paper.layouts,
            ),
        ] = None,
        allow_package: AllowPackage = None,
    ) -> None:
        """Write a trained model for transformers: `from_pretrained(OUT)` reads it."""
        if layout is not None and layout not in paper.layouts:
            known = ", ".join(paper.layouts) or "nothing: this package has no other layouts"
            raise UserError(f"--layout takes {known}, got {layout!r}")
        check_writable(out, is_folder=True)
        _quiet_transformers()
        from mezzo_core.hub.folder import export_model

        files = export_model(
            run,
            out,
            tokenizer=tokenizer,
            allow_packages=allow_package or (),
            layout=None if layout is None else paper.layouts[layout](),
        )
        show(f"{out}: {', '.join(files)}")

    @app.command(name="import")
    def import_command(
        folder: Annotated[Path, typer.Argument(help="A folder that transformers has written.")],
        run: Annotated[Path, typer.Argument(help="The new run's folder.", callback=expanded)],
        allow_package: AllowPackage = None,
    ) -> None:
        """Read a model back from transformers, for `generate`, `eval` and `train --init-from`."""
        _quiet_transformers()
        from mezzo_core.hub.folder import import_model

        check_writable(run, is_folder=True)
        layouts = [load() for load in paper.layouts.values()]
        import_model(folder, run, allow_packages=allow_package or (), layouts=layouts)
        show(f"the model is in {run / 'model'}")


def measure_tasks(model: "LM", tokenizer: "Tokenizer", asked: TaskOptions) -> dict[str, Any]:
    """Return a model's scores on tasks, and how they were measured.

    RULER and LongBench are measured by mezzo itself, all other tasks by lm-eval.

    Raises:
        UserError: if a task cannot be asked, or lm-eval is not installed.
    """
    names = asked.names()
    if asked.folder is not None and not asked.folder.is_dir():
        raise UserError(f"--task-folder {asked.folder}: there is no such folder")
    of_ruler = [name for name in names if name.startswith("ruler_")]
    others = [name for name in names if name not in of_ruler]
    # What cannot be asked is refused before any task is answered, lm-eval's names as it begins.
    for name in of_ruler:
        _check_ruler(tokenizer, name, asked)
    file = asked.longbench
    by_task = {} if file is None else _read_longbench(tokenizer, file, asked.max_length)
    told = _measure_others(model, tokenizer, others, asked) if others else {"results": {}}
    found = {name: _measure_ruler(model, tokenizer, name, asked) for name in of_ruler}
    for name, questions in by_task.items():
        found[f"longbench_{name}"] = _measure_longbench(model, tokenizer, name, questions, asked)
    return {**told, "results": {**found, **told["results"]}}


def _check_ruler(tokenizer: "Tokenizer", name: str, asked: TaskOptions) -> None:
    from mezzo_core.eval.ruler import TASKS, questions
    from mezzo_core.eval.ruler.measure import LENGTH

    if name not in TASKS:
        raise UserError(f"there is no task {name!r}{nearest(name, TASKS)}")
    if asked.num_fewshot is not None:
        raise UserError(f"{name} has its own examples: --num-fewshot does not fit")
    next(questions(TASKS[name], tokenizer, asked.max_length or LENGTH, 1))


def _measure_ruler(
    model: "LM", tokenizer: "Tokenizer", name: str, asked: TaskOptions
) -> dict[str, Any]:
    from mezzo_core.eval.ruler import TASKS, measure_ruler

    sizes = {"length": asked.max_length, "num_questions": asked.limit}
    _say_what_is_asked(name)
    found = measure_ruler(
        model,
        tokenizer,
        TASKS[name],
        batch_size=asked.batch_size,
        segment_tokens=asked.segment_tokens,
        **{size: value for size, value in sizes.items() if value is not None},
    )
    return found._asdict()


def _read_longbench(
    tokenizer: "Tokenizer", file: Path, max_length: int | None
) -> "dict[str, list[Question]]":
    """Return the questions of each task."""
    from mezzo_core.eval.longbench import check_length, read_questions

    by_task: dict[str, list[Question]] = {}
    for question in read_questions(file):
        by_task.setdefault(question.dataset, []).append(question)
    if max_length is not None:
        check_length(max_length, by_task, tokenizer)
    return by_task


def _measure_longbench(
    model: "LM", tokenizer: "Tokenizer", name: str, questions: "list[Question]", asked: TaskOptions
) -> dict[str, Any]:
    from mezzo_core.eval.longbench import measure_longbench

    length = {} if asked.max_length is None else {"length": asked.max_length}
    _say_what_is_asked(name)
    found = measure_longbench(
        model,
        tokenizer,
        questions[: asked.limit],
        batch_size=asked.batch_size,
        segment_tokens=asked.segment_tokens,
        **length,
    )
    return found._asdict()


def _say_what_is_asked(task: str) -> None:
    show(f"asking {task}", Console(stderr=True))


def _measure_others(
    model: "LM", tokenizer: "Tokenizer", names: list[str], asked: TaskOptions
) -> dict[str, Any]:
    _quiet_transformers()
    import_library("lm_eval", "hub")
    from mezzo_core.hub.lm_eval import MezzoEvalLM, evaluate_tasks

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    segments = {} if asked.segment_tokens is None else {"segment_tokens": asked.segment_tokens}
    adapter = MezzoEvalLM(
        model, tokenizer, batch_size=asked.batch_size, max_length=asked.max_length, **segments
    )
    # What lm-eval prints is no part of the results, which are JSON.
    with library_errors("lm-eval failed"), redirect_stdout(sys.stderr):
        found = evaluate_tasks(
            adapter,
            names,
            folder=asked.folder,
            num_fewshot=asked.num_fewshot,
            limit=asked.limit,
        )
    scores = {
        task: {name: _finite(score) for name, score in of_task.items()}
        for task, of_task in found["results"].items()
    }
    how = {name: found[name] for name in ("versions", "n-shot", "n-samples")}
    return {"results": scores, **how}


def _finite(score: Any) -> Any:
    """Return a score, or None if JSON has no such number, such as an infinite perplexity."""
    return None if isinstance(score, float) and not math.isfinite(score) else score


def _quiet_transformers() -> None:
    """Keep transformers' progress bars and warnings off a command's output."""
    told = import_library("transformers", "hub").utils.logging
    told.disable_progress_bar()
    told.set_verbosity_error()
