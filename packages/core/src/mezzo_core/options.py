"""Options of the commands."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

Config = TypeVar("Config", bound=Any)
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: a GPU if any.")]
AllowPackage = Annotated[
    list[str] | None,
    typer.Option(help="A package of yours whose layers the model may have; repeat for several."),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Your text: a .txt, .jsonl, .json, .csv or .parquet file, a folder or a glob of them, "
        "or hub:OWNER/NAME. Default: what the model was trained on."
    ),
]
TrainData = Annotated[
    list[str] | None,
    typer.Option(
        help="Your text: a .txt, .jsonl, .json, .csv or .parquet file, a folder or a glob of them, "
        "or hub:OWNER/NAME. Several are mixed by weights: --data 0.7:a.txt --data 0.3:b.jsonl. "
        "Default: what the recipe says (the embedded novels for tiny recipes)."
    ),
]
Answers = Annotated[
    str | None,
    typer.Option(
        "--sft",
        help="Learn answers alone: a .jsonl file, a folder or a glob of them, with a "
        '{"prompt": ..., "answer": ...} or {"messages": [...]} on each line. Takes the place of '
        "--data.",
    ),
]
TestedAnswers = Annotated[
    str | None,
    typer.Option(
        "--sft",
        help="Measure answers alone, after their prompts: files as those of `train --sft`. Takes "
        "the place of --data.",
    ),
]
ValidationData = Annotated[
    str | None,
    typer.Option(help="A text to validate on, as --data. Default: a part of --data, held out."),
]
TextColumn = Annotated[
    str | None, typer.Option(help="The field of the text, in all but .txt files. Default: text.")
]
SkipBad = Annotated[
    bool | None,
    typer.Option("--skip-bad", help="Leave out records without text, and say how many they are."),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(help="byte, hub:NAME, or a file or folder. Default: the recipe's or model's."),
]
InitFrom = Annotated[
    Path | None,
    typer.Option(
        help="Start from the weights of this run or model folder. The model and its "
        "tokenizer are then the folder's, the rest is the recipe's."
    ),
]
Tasks = Annotated[
    str | None,
    typer.Option(
        help="Names of tasks, with commas between them: lm-eval's, or ruler, ruler_vt and so on, "
        "of --seq-len tokens."
    ),
]
Longbench = Annotated[
    Path | None,
    typer.Option(
        help="A .jsonl file of LongBench: prompts of --seq-len tokens at most, answered greedily.",
    ),
]
TaskFolder = Annotated[
    Path | None,
    typer.Option(help="A folder with tasks of yours (.yaml files), in place of lm-eval's own."),
]
NumFewshot = Annotated[
    int | None, typer.Option(min=0, help="Examples before each question of a task.")
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Questions a task. Default: all; 500 of ruler.")
]


def with_options(config: Config, given: Mapping[str, Any]) -> Config:
    """Replace the fields of a configuration that options give; typer's lists become tuples."""
    found = {each.name: given.get(each.name) for each in fields(config)}
    values = {name: value for name, value in found.items() if value not in (None, [])}
    return replace(config, **{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
