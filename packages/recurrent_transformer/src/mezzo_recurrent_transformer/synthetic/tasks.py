"""The tasks with MAD's sizes."""

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
