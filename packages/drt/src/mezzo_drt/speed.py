"""Speeds: decoding after a prompt (Table 3), training (Table 4, Figure 3a), reading long texts.

Each is measured into `NAME.json` below a folder. The op is checked before anything is timed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mezzo_core.bench import Result, attempt, start_afresh
from mezzo_core.bench.jobs import side_by_side
from mezzo_core.bench.result import Say
from mezzo_core.bench.training_step import TrainingSpeed, time_training, training_step
from mezzo_core.nn import AttentionConfig, LMConfig, MLPConfig
from mezzo_core.nn.lm import LM
from mezzo_core.papers.measurement import Measurement
from mezzo_core.papers.speeds import AbstractSizes, Measurers, as_measured, open_speeds

from mezzo_drt import bench
from mezzo_drt.baselines.block_recurrent import BlockRecurrent
from mezzo_drt.baselines.models import ModelSize, block_recurrent_lm, landmark_lm
from mezzo_drt.inference import Decoding, Reading, time_decoding, time_reading
from mezzo_drt.recipes import ARCHITECTURES, PAPER_NAMES, PG19, SIZES, Hyperparameters, paper, tiny

BASE, DRT1, DRT2 = (PAPER_NAMES[name] for name in ("base", "drt1", "drt2"))
LANDMARK, BLOCK_RECURRENT, PLAIN = "Landmark Attn.", "Block Recurrent TFM", "BaseLM"
WINDOW, FULL = "Transformer_SW", "Transformer_full_attn"
DECODING = (PLAIN, DRT1, DRT2, BLOCK_RECURRENT, LANDMARK)
CAN_OFFLOAD = (PLAIN, DRT1, DRT2)
TRAINING, GROWING = (WINDOW, FULL, DRT1, DRT2), (BASE, DRT1, DRT2, BLOCK_RECURRENT)
"""The models of Table 4 and of Figure 3a. Landmark Attention is not among these: it is trained on
rows of 768 tokens, for its attention takes memory by the square of a row."""
READING = (PLAIN, DRT1, DRT2)
OFFLOADED = {
    True: ("time/token w/ cpu offload", "mem. cost w/ cpu offload"),
    False: ("time/token w/o cpu offload", "mem. cost w/o cpu offload"),
}
"""The columns of Table 3."""
PASSES = 3
_STEPS = (
    "whole training steps (forward, backward, fused AdamW; on a GPU bf16 autocast over float32, "
    "layers compiled one by one)"
)
COMPILERS = 5
"""Processes that compile at the same time, before anything is timed."""


@dataclass(frozen=True)
class Sizes(AbstractSizes):
    """The sizes of all speeds.

    Attributes:
        size: whose recipes decode, and are trained at each length.
        prompts: tokens of Table 3's prompts, by its names.
        new_tokens: that are timed in each pass after a prompt, whole chunks.
        prefill: tokens of a prompt that are run at a time.
        texts: tokens of the texts that are read.
        segment: tokens of them that are run at a time.
        trained: the models of Table 4, by its columns.
        lengths: T of Figure 3a.
        tokens: of a training step at each of these lengths.
    """

    size: str
    prompts: Mapping[str, int]
    new_tokens: int
    prefill: int
    texts: tuple[int, ...]
    segment: int
    trained: Mapping[str, Hyperparameters]
    lengths: tuple[int, ...]
    tokens: int


def _shape(num_layers: int, d_model: int, hidden: int, seq_len: int) -> Hyperparameters:
    return replace(paper(num_layers, d_model, hidden, PG19), seq_len=seq_len)


PAPER = Sizes(
    device="cuda",
    size="128m_pg19",
    prompts={"16K": 2**14, "48K": 3 * 2**14},
    new_tokens=128,
    prefill=4096,
    texts=tuple(2**i for i in range(16, 25, 2)),
    segment=2**16,
    trained={  # the paper prints no shapes: these are the usual ones of such sizes
        "350M, 32K": _shape(24, 1024, 2816, 2**15),
        "760M, 16K": _shape(24, 1536, 4096, 2**14),
        "1.5B, 8K": _shape(28, 2048, 5632, 2**13),
        "3B, 4K": _shape(36, 2560, 6912, 2**12),
    },
    lengths=(2**12, 2**14, 2**16),
    tokens=2**16,
)
DRY = Sizes(
    device="cpu",
    size="tiny",
    prompts={"16K": 64, "48K": 96},
    new_tokens=16,
    prefill=48,
    texts=(96, 192),
    segment=48,
    trained=dict.fromkeys(PAPER.trained, replace(tiny(), seq_len=64)),
    lengths=(32, 64),
    tokens=128,
)
"""A rehearsal on a CPU: the same steps at toy sizes."""


def measure_inference(sizes: Sizes, folder: Path, say: Say) -> Measurement | None:
    """Measure Table 3: the time of a token and the state's memory, with and without offload.

    Returns:
        What the file then has; None if none of its models is wanted.

    Raises:
        UserError: if the op computes wrong results, which is then not timed, or the file cannot be
            written or continued.
    """
    result = _result(
        "inference",
        sizes,
        folder,
        say,
        title="Decoding after a prompt (Table 3)",
        setting=f"models of the size {sizes.size}, random weights, {_dtype(sizes)}, one sequence: "
        f"milliseconds of a token, the mean over {sizes.new_tokens} greedy ones by CUDA graphs "
        "that were captured before, landmarks included; GB of the state on the GPU, without "
        f"weights; {PASSES} passes, one after another; {PLAIN} has nothing to offload and is "
        "measured for both",
        columns=sum(OFFLOADED.values(), ()),
        models=DECODING,
        groups=tuple(sizes.prompts),
        unit="ms, GB",
        better="lower",
    )
    for model in filter(sizes.wants, DECODING):
        for group, prompt in sizes.prompts.items():
            for offload, (times, memory) in OFFLOADED.items():
                if result.has(model, times, group) or (offload and model not in CAN_OFFLOAD):
                    continue
                passes = attempt(partial(_decode, sizes, model, prompt, offload))
                for field, column in (("ms", times), ("state_gb", memory)):
                    result.add_passes(passes, field, model=model, column=column, group=group)
    return as_measured(result)


def measure_training(sizes: Sizes, folder: Path, say: Say) -> Measurement | None:
    """Measure Table 4: the tokens a second of training steps, and the highest memory.

    Returns, raises: as `measure_inference`.
    """
    shapes = "; ".join(
        f"{name}: {s.drt.num_layers} layers, C = {s.d_model}, F = {s.drt.hidden}, T = {s.seq_len}"
        for name, s in sizes.trained.items()
    )
    result = _result(
        "training_speed",
        sizes,
        folder,
        say,
        title="Training throughput (Table 4)",
        setting=f"{_STEPS} of one sequence of random tokens; {shapes}",
        columns=tuple(sizes.trained),
        models=TRAINING,
        unit="tokens/s",
        better="higher",
    )
    cells = (
        Cell(model, column, s, 1, s.seq_len)
        for column, s in sizes.trained.items()
        for model in TRAINING
    )
    for cell, passes in _trained(cells, sizes, result):
        result.add_passes(
            passes, "tokens_per_second", model=cell.model, column=cell.column, B=cell.B
        )
    return as_measured(result)


def measure_length(sizes: Sizes, folder: Path, say: Say) -> Measurement | None:
    """Measure Figure 3a: the time of a training step, for each of its sequences, over T.

    All steps have as many tokens, so that short sequences keep a GPU as busy as long ones. BaseLM's
    time over DRT's is the share of the training speed that retrieval leaves.

    Returns, raises: as `measure_inference`.
    """
    result = _result(
        "length",
        sizes,
        folder,
        say,
        title="Time of training over the length (Figure 3a)",
        setting=f"{_STEPS} of {sizes.tokens} random tokens, models of the size "
        f"{sizes.size}: the step's milliseconds over its sequences",
        columns=tuple(map(str, sizes.lengths)),
        models=GROWING,
        unit="ms",
        better="lower",
    )
    s = SIZES[sizes.size]()
    cells = (
        Cell(model, str(T), s, sizes.tokens // T, T) for T in sizes.lengths for model in GROWING
    )
    for cell, found in _trained(cells, sizes, result):
        passes = found if isinstance(found, str) else [OfSequence.of(p, cell.B) for p in found]
        result.add_passes(passes, "ms", model=cell.model, column=cell.column, B=cell.B)
    return as_measured(result)


def measure_reading(sizes: Sizes, folder: Path, say: Say) -> Measurement | None:
    """Measure the time to read a text, and the memory that it takes, to millions of tokens.

    Returns, raises: as `measure_inference`.
    """
    result = _result(
        "reading",
        sizes,
        folder,
        say,
        title="Time to read a text",
        setting=f"models of the size {sizes.size}, random weights, {_dtype(sizes)}, one sequence "
        f"in segments of {sizes.segment} random tokens, chunks in the host's memory, one pass; "
        "peak GB: of the GPU, weights included",
        columns=tuple(map(str, sizes.texts)),
        models=READING,
        unit="s",
        better="lower",
    )
    for T in sizes.texts:
        for model in filter(sizes.wants, READING):
            if not result.has(model, str(T)):
                passes = attempt(partial(_read, sizes, model, T))
                result.add_passes(passes, "seconds", model=model, column=str(T))
    return as_measured(result)


MEASURERS: Measurers = {
    "inference": measure_inference,
    "length": measure_length,
    "training_speed": measure_training,
    "reading": measure_reading,
}
"""What this module measures, by the names of the files."""


def _decode(sizes: Sizes, model: str, prompt: int, offload: bool) -> list[Decoding]:
    lm = _reader(sizes, model, offload)
    # Of two landmarks the first is eager, and the second is captured.
    warmup = 2 * SIZES[sizes.size]().drt.chunk_size + 2
    return time_decoding(lm, prompt, sizes.new_tokens, sizes.prefill, warmup=warmup, passes=PASSES)


def _read(sizes: Sizes, model: str, count: int) -> list[Reading]:
    return [time_reading(_reader(sizes, model, offload=True), count, sizes.segment)]


def _reader(sizes: Sizes, model: str, offload: bool) -> LM:
    """Return a model with random weights, that keeps chunks in the host's memory if asked for."""
    start_afresh()
    s = SIZES[sizes.size]()
    config = model_config(model, replace(s, drt=replace(s.drt, offload=offload)))
    lm = _build(config, torch.device(sizes.device)).eval()
    return lm.bfloat16() if sizes.device == "cuda" else lm


@dataclass(frozen=True)
class OfSequence:
    """What one of a step's sequences costs; the host's time and the memory are the step's."""

    ms: float
    tokens_per_second: float
    host_ms: float | None
    peak_gb: float | None

    @classmethod
    def of(cls, step: TrainingSpeed, B: int) -> "OfSequence":
        """Return it for a step of B sequences."""
        return cls(step.step_ms / B, step.tokens_per_second, step.host_ms, step.peak_gb)


@dataclass(frozen=True)
class Cell:
    """A training that is timed: B sequences of T tokens in a step."""

    model: str
    column: str
    s: Hyperparameters
    B: int
    T: int

    @property
    def shallow(self) -> "Cell":
        """The same layers, compiled, in a model of two; both DRTs have the same."""
        s = replace(self.s, drt=replace(self.s.drt, num_layers=2))
        return replace(self, model=DRT1 if self.model == DRT2 else self.model, s=s)


def _trained(
    cells: Iterable[Cell], sizes: Sizes, result: Result
) -> Iterator[tuple[Cell, list[TrainingSpeed] | str]]:
    """Yield the speed of each cell that is wanted and not in the file."""
    device = torch.device(sizes.device)
    missing = [c for c in cells if sizes.wants(c.model) and not result.has(c.model, c.column)]
    if device.type == "cuda":
        shallow = [cell.shallow for cell in missing]
        calls = {(cell.model, cell.column): partial(compile_ahead, cell) for cell in shallow}
        for _ in side_by_side(calls, result.path.parent, device, COMPILERS):
            pass
    for cell in missing:
        yield cell, attempt(partial(_train, cell, device))


def _train(cell: Cell, device: torch.device) -> list[TrainingSpeed]:
    start_afresh()
    return time_training(_compiled(cell, device), cell.B, cell.T, passes=PASSES)


def compile_ahead(cell: Cell, folder: Path, device: torch.device) -> None:
    """Compile a model's layers; torch keeps the code on the disk, where other processes find it."""
    torch._inductor.config.compile_threads = 1  # processes that do this are busy enough
    start_afresh()
    training_step(_compiled(cell, device), cell.B, cell.T)()


def _compiled(cell: Cell, device: torch.device) -> LM:
    lm = _build(model_config(cell.model, cell.s), device)
    for unit in lm.units():
        # The loop of a recurrent layer would be unrolled.
        if device.type == "cuda" and not isinstance(getattr(unit, "mixer", None), BlockRecurrent):
            unit.compile(dynamic=False)
    return lm


def model_config(model: str, s: Hyperparameters) -> LMConfig:
    """Return a model by the paper's name, with the sizes of recipes."""
    drt = s.drt
    if model in (LANDMARK, BLOCK_RECURRENT):
        size = ModelSize(s.vocab_size, s.d_model, drt.num_layers, drt.head_dim, drt.hidden or 0)
        if model == LANDMARK:
            return landmark_lm(size, drt.chunk_size)
        W = drt.window_size
        return block_recurrent_lm(size, window_size=W * 3 // 2, block_size=W, num_states=W)
    if model == FULL:
        mixers = (AttentionConfig(drt.head_dim),) * drt.num_layers
        return LMConfig(
            s.vocab_size, s.d_model, mixers, MLPConfig("swiglu", drt.hidden), drt.norm_eps
        )
    names = {WINDOW: "base", PLAIN: "base", BASE: "base", DRT1: "drt1", DRT2: "drt2"}
    return ARCHITECTURES[names[model]](s)


def _build(config: LMConfig, device: torch.device) -> LM:
    torch.manual_seed(0)
    with device:
        return config.build()


def _dtype(sizes: Sizes) -> str:
    return "bf16" if sizes.device == "cuda" else "float32"


def _result(name: str, sizes: Sizes, folder: Path, say: Say, **header: Any) -> Result:
    """Open a result file, after a check of the op."""
    device = torch.device(sizes.device)
    shapes, dtype = bench.QUICK, torch.float32
    if device.type == "cuda":
        shapes, dtype = bench.GPU, torch.bfloat16
    bench.check_op(**bench.op_inputs(2, 8 * shapes.chunk_size, shapes, device, dtype))
    return open_speeds(folder / f"{name}.json", sizes, PAPER, say, **header)
