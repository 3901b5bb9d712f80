"""What a result file measures, in words and names: its head, which the machine's follows."""

from dataclasses import dataclass
from typing import Literal

from mezzo_core.config_json import check_fields


@dataclass(frozen=True)
class Header:
    """What a file measures.

    Attributes:
        kind: a speed, a training's perplexity, or a recall task's accuracy.
        title: the table or figure, in words.
        setting: what was measured, in words.
        how: how this relates to the paper's own setting.
        columns, models, groups: names in the paper's order; no groups if there is only one.
        unit, better: of the values, and whether "lower" or "higher" ones are better.
    """

    kind: Literal["speed", "training", "recall"]
    title: str
    setting: str
    how: Literal["the paper's setting", "other hardware", "scaled down"]
    columns: tuple[str, ...]
    models: tuple[str, ...]
    unit: str
    better: Literal["lower", "higher"]
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
