"""The tasks with MAD's sizes, and its harder settings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mezzo_recurrent_transformer.synthetic.copying import CopyingConfig, SelectiveCopyingConfig
from mezzo_recurrent_transformer.synthetic.memory import CompressionConfig, MemorizationConfig
from mezzo_recurrent_transformer.synthetic.recall import FuzzyRecallConfig, RecallConfig
from mezzo_recurrent_transformer.synthetic.task import AbstractTask

_ALL: tuple[AbstractTask, ...] = (
    RecallConfig(),
    RecallConfig(vocab_size=32, num_noise=16, noise_share=0.2),
    FuzzyRecallConfig(),
    SelectiveCopyingConfig(),
    MemorizationConfig(),
    CompressionConfig(),
    CopyingConfig(),
)
TASKS = {task.name: task for task in _ALL}
"""The baseline setting of each task, by its name."""

_FEWER = {"train_rows": (6400, 3200, 1600, 800)}
_LONGER = {"seq_len": (256, 512, 1024)}
_LARGER = {"vocab_size": (32, 64, 128)}
HARDER: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "in-context-recall": {**_LARGER, **_LONGER, **_FEWER},
    "noisy-in-context-recall": {
        "vocab_size": (48, 80, 144),
        **_LONGER,
        **_FEWER,
        "noise_share": (0.4, 0.6, 0.8),
    },
    "fuzzy-in-context-recall": {**_LARGER, **_LONGER, **_FEWER},
    "selective-copying": {
        **_LARGER,
        "seq_len": (512, 1024),
        **_FEWER,
        "num_words": (32, 64, 96),
    },
    "memorization": {"vocab_size": (512, 1024, 2048, 4096, 8192)},
    "compression": {**_LARGER, "seq_len": (64, 128, 256), **_FEWER},
    "copying": {"max_letters": (40, 80)},
}
"""What MAD changes, one at a time; of copying, what we change."""


def settings(task: AbstractTask, *, harder: bool) -> dict[str, AbstractTask]:
    """Return the settings of a task by their names: its own, and the harder ones if asked for."""
    changes = HARDER[task.name] if harder else {}
    return {task.name: task} | {
        f"{task.name}, {field} {value}": replace(task, **{field: value})
        for field, values in changes.items()
        for value in values
    }
