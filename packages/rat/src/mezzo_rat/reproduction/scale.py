"""The scales of a reproduction (`--scale`), and the six architectures that it compares."""

from dataclasses import dataclass, replace

from mezzo_core.reproduction import training
from mezzo_core.reproduction.training import Budget

from mezzo_rat.recipes import PAPER_NAMES
from mezzo_rat.reproduction.gpu.shapes import FULL, SpeedShapes

RECIPES_OF_MODELS = {model: f"tiny_{name}" for name, model in PAPER_NAMES.items()}


@dataclass(frozen=True)
class Scale:
    """How much one reproduction runs.

    Attributes:
        name: the value of `--scale`.
        budget: of the tiny trainings; some test lengths exceed the training length (Fig. 6).
        timed_lengths: T of the layers that are timed.
        timed_tokens, timed_width: tokens a batch and model width C of these layers.
        decode_batch: B of the timed decode steps.
        timed_seconds: for each timing.
        new_tokens: tokens generated in the throughput measurement, for each prompt.
        sample_tokens: length of the sample text.
        threads: of this process; None keeps torch's choice. On a busy machine, threads that wait
            for each other make tiny work slow.
        speed: shapes at which the speed tables are measured. None: small layers and models are
            timed on the CPU instead.
    """

    name: str
    budget: Budget
    timed_lengths: tuple[int, ...]
    timed_tokens: int
    timed_width: int
    decode_batch: int
    timed_seconds: float
    new_tokens: int
    sample_tokens: int
    threads: int | None
    speed: SpeedShapes | None = None


CPU = Scale(
    name="cpu",
    budget=replace(training.CPU, test_lengths=(256, 512, 1024, 2048)),
    timed_lengths=(512, 1024, 2048, 4096),
    timed_tokens=4096,
    timed_width=128,
    decode_batch=8,
    timed_seconds=0.05,
    new_tokens=32,
    sample_tokens=400,
    threads=None,
)
SMOKE = Scale(
    name="smoke",
    budget=replace(training.SMOKE, test_lengths=(64, 128)),
    timed_lengths=(64, 128),
    timed_tokens=128,
    timed_width=64,
    decode_batch=2,
    timed_seconds=0.0,
    new_tokens=3,
    sample_tokens=20,
    threads=1,
)
GPU = replace(CPU, name="gpu", speed=FULL)
SCALES = {scale.name: scale for scale in (CPU, SMOKE, GPU)}
