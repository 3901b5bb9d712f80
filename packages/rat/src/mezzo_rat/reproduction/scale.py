"""How much a reproduction runs, and the six architectures that it compares."""

from dataclasses import dataclass, replace

from mezzo_rat.recipes import PAPER_NAMES
from mezzo_rat.reproduction.gpu.scale import FULL, SpeedScale

RECIPES_OF_MODELS = {model: f"tiny_{name}" for name, model in PAPER_NAMES.items()}


@dataclass(frozen=True)
class Scale:
    """The budget of one reproduction.

    Attributes:
        name: what `--scale` takes.
        seeds: of weights and data order; every architecture is trained with each.
        steps, batch_size, seq_len: of each training.
        eval_batches: validation batches of an evaluation; None reads the whole validation part.
        test_lengths: T of the evaluations beyond the training length (Fig. 6).
        timed_lengths: T of the layers that are timed.
        timed_tokens, timed_width: tokens a batch and model width C of these layers.
        decode_batch: B of the timed decode steps.
        timed_seconds: for each timing.
        new_tokens: tokens generated in the throughput measurement, for each prompt.
        sample_tokens: length of the sample text.
        threads: of this process; None leaves torch's choice. On a busy machine, threads that wait
            for each other slow tiny work down.
        parallel: train one model on each core, rather than one model on all cores.
        speed: the sizes at which the tables of speed are measured; None times small layers and
            models on the CPU instead.
    """

    name: str
    seeds: tuple[int, ...]
    steps: int
    batch_size: int
    seq_len: int
    eval_batches: int | None
    test_lengths: tuple[int, ...]
    timed_lengths: tuple[int, ...]
    timed_tokens: int
    timed_width: int
    decode_batch: int
    timed_seconds: float
    new_tokens: int
    sample_tokens: int
    threads: int | None
    parallel: bool
    speed: SpeedScale | None = None


CPU = Scale(
    name="cpu",
    seeds=(0, 1, 2),
    steps=300,
    batch_size=2,
    seq_len=512,
    eval_batches=None,
    test_lengths=(256, 512, 1024, 2048),
    timed_lengths=(512, 1024, 2048, 4096),
    timed_tokens=4096,
    timed_width=128,
    decode_batch=8,
    timed_seconds=0.05,
    new_tokens=32,
    sample_tokens=400,
    threads=None,
    parallel=True,
)
SMOKE = Scale(
    name="smoke",
    seeds=(0,),
    steps=3,
    batch_size=1,
    seq_len=64,
    eval_batches=1,
    test_lengths=(64, 128),
    timed_lengths=(64, 128),
    timed_tokens=128,
    timed_width=64,
    decode_batch=2,
    timed_seconds=0.0,
    new_tokens=3,
    sample_tokens=20,
    threads=1,
    parallel=False,
)
GPU = replace(CPU, name="gpu", speed=FULL)
SCALES = {scale.name: scale for scale in (CPU, SMOKE, GPU)}
