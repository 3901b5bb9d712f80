"""Speeds: decoding after a prompt (Table 3), training (Table 4, Figure 3a), reading long texts.

Each is measured into `NAME.json` below a folder.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mezzo_core.nn import AttentionConfig, LMConfig, MLPConfig
from mezzo_core.nn.lm import LM
from mezzo_core.reproduction import Cell, Entry
from mezzo_core.reproduction.layer_speed import build_model
from mezzo_core.reproduction.runner import Job, passes, timing
from mezzo_core.reproduction.speeds import AbstractSizes, Speeds
from mezzo_core.reproduction.training_speed import TrainingSpeed, time_training

from mezzo_drt.baselines.block_recurrent import BlockRecurrent
from mezzo_drt.baselines.models import block_recurrent_lm, landmark_lm
from mezzo_drt.recipes import ARCHITECTURES, PAPER_NAMES, PG19, SIZES, Hyperparameters, paper, tiny
from mezzo_drt.reproduction.decoding_speed import Reading, time_decoding, time_reading

BASE, DRT1, DRT2 = (PAPER_NAMES[name] for name in ("base", "drt1", "drt2"))
LANDMARK, BLOCK_RECURRENT, PLAIN = "Landmark Attn.", "Block Recurrent TFM", "BaseLM"
WINDOW, FULL = "Transformer_SW", "Transformer_full_attn"
DECODING = (PLAIN, DRT1, DRT2, BLOCK_RECURRENT, LANDMARK)
CAN_OFFLOAD = (PLAIN, DRT1, DRT2, LANDMARK)
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


def _shape(num_layers: int, d_model: int, hidden: int, seq_len: int) -> Hyperparameters:
    return replace(paper(num_layers, d_model, hidden, PG19), seq_len=seq_len)


TRAINED = {  # the paper prints no shapes: these are the usual ones of such sizes
    "350M, 32K": _shape(24, 1024, 2816, 2**15),
    "760M, 16K": _shape(24, 1536, 4096, 2**14),
    "1.5B, 8K": _shape(28, 2048, 5632, 2**13),
    "3B, 4K": _shape(36, 2560, 6912, 2**12),
}
"""The sizes of Table 4, by its columns."""


@dataclass(frozen=True)
class Sizes(AbstractSizes):
    """The sizes of all speeds."""

    size: str = "128m_pg19"  # whose recipes decode, and are trained at each length
    prompts: Mapping[str, int] = field(default_factory=lambda: {"16K": 2**14, "48K": 3 * 2**14})
    """Table 3's, by its names, in tokens."""
    new_tokens: int = 128  # that are timed in each pass after a prompt, whole chunks
    prefill: int = 4096  # tokens of a prompt that are run at a time
    texts: tuple[int, ...] = tuple(2**i for i in range(16, 25, 2))  # that are read, in tokens
    segment: int = 2**16  # tokens of them that are run at a time
    trained: Mapping[str, Hyperparameters] = field(default_factory=lambda: TRAINED)
    lengths: tuple[int, ...] = (2**12, 2**14, 2**16)  # T of Figure 3a
    tokens: int = 2**16  # of a training step at each of these lengths


PAPER = Sizes()
DRY = Sizes(
    device="cpu",
    size="tiny",
    prompts={"16K": 64, "48K": 96},
    new_tokens=16,
    prefill=48,
    texts=(96, 192),
    segment=48,
    trained=dict.fromkeys(TRAINED, replace(tiny(), seq_len=64)),
    lengths=(32, 64),
    tokens=128,
)
"""Toy sizes for a CPU, and for a rehearsal: the same steps."""


def inference(sizes: Sizes) -> tuple[dict[str, Any], list[Job]]:
    """List Table 3: the time of a token and the state's memory, with and without offload."""
    how, where = "by CUDA graphs that were captured before", " on the GPU"
    if sizes.device == "cpu":
        prompts = " and ".join(map(str, sizes.prompts.values()))
        how, where = f"after prompts of {prompts} tokens, on a CPU", ""
    header = {
        "title": "Decoding after a prompt (Table 3)",
        "setting": f"models of the size {sizes.size}, random weights, {sizes.dtype}, one "
        f"sequence: ms of a token, the mean over {sizes.new_tokens} greedy ones {how}, landmarks "
        f"included; GB of the state{where}, without weights; {PASSES} passes, one after another; "
        f"{PLAIN} has nothing to offload and is measured for both; {LANDMARK} with offload is "
        "eager, for each of its layers waits to know what it fetches",
        "unit": "ms, GB",
    }
    jobs = [
        Job(
            tuple(Cell(model, column, group) for column in columns),
            partial(_decode, sizes, model, prompt, offload),
        )
        for model in DECODING
        for group, prompt in sizes.prompts.items()
        for offload, columns in OFFLOADED.items()
        if model in CAN_OFFLOAD or not offload
    ]
    return header, jobs


def _decode(
    sizes: Sizes, model: str, prompt: int, offload: bool, cells: tuple[Cell, ...],
    folder: Path, device: torch.device,
) -> Iterator[list[Entry]]:  # fmt: skip
    """Yield the passes of a token's time, and those of the state's memory."""
    lm = _reader(sizes, model, offload, device)
    # Of two landmarks the first is eager, and the second is captured.
    warmup = 2 * SIZES[sizes.size]().drt.chunk_size + 2
    lengths = (prompt, sizes.new_tokens, sizes.prefill)
    found = time_decoding(lm, *lengths, warmup=warmup, passes=PASSES)
    for cell in cells:
        yield passes(cell, found, "ms" if cell.column.startswith("time") else "state_gb")


def training(sizes: Sizes) -> tuple[dict[str, Any], list[Job]]:
    """List Table 4: the tokens a second of training steps, and the highest memory."""
    shapes = "; ".join(
        f"{name}: {s.drt.num_layers} layers, C = {s.d_model}, F = {s.drt.hidden}, T = {s.seq_len}"
        for name, s in sizes.trained.items()
    )
    header = {
        "title": "Training throughput (Table 4)",
        "setting": f"{_STEPS} of one sequence of random tokens; {shapes}",
        "unit": "tokens/s",
        "better": "higher",
    }
    jobs = [
        timing(
            {Cell(model, column): {"B": 1, "T": s.seq_len, "passes": PASSES}},
            partial(_training_timer, model, s),
            "tokens_per_second",
        )
        for column, s in sizes.trained.items()
        for model in TRAINING
    ]
    return header, jobs


def length(sizes: Sizes) -> tuple[dict[str, Any], list[Job]]:
    """List Figure 3a: the time of a training step, for each of its sequences, over T.

    All steps have as many tokens, so that short sequences keep a GPU as busy as long ones. BaseLM's
    time over DRT's is the share of the training speed that retrieval leaves.
    """
    header = {
        "title": "Time of training over the length (Figure 3a)",
        "setting": f"{_STEPS} of {sizes.tokens} random tokens, models of the size "
        f"{sizes.size}: the step's milliseconds over its sequences",
        "unit": "ms",
    }
    jobs = [
        timing(
            {Cell(model, str(T)): {"B": sizes.tokens // T, "T": T, "passes": PASSES}},
            partial(_sequence_timer, model, SIZES[sizes.size]()),
            "step_ms",
        )
        for T in sizes.lengths
        for model in GROWING
    ]
    return header, jobs


def _sequence_timer(
    model: str, s: Hyperparameters, device: torch.device
) -> Callable[..., list[TrainingSpeed]]:
    """Return a function that times a step, and tells the share of one of its sequences."""
    time = _training_timer(model, s, device)
    return lambda B, **sizes: [replace(p, step_ms=p.step_ms / B) for p in time(B=B, **sizes)]


def _training_timer(
    model: str, s: Hyperparameters, device: torch.device
) -> Callable[..., list[TrainingSpeed]]:
    lm = build_model(model_config(model, s), device)
    for unit in lm.units():
        # The loop of a recurrent layer would be unrolled.
        if device.type == "cuda" and not isinstance(getattr(unit, "mixer", None), BlockRecurrent):
            unit.compile(dynamic=False)
    return partial(time_training, lm)


def reading(sizes: Sizes) -> tuple[dict[str, Any], list[Job]]:
    """List the time to read a text, and the memory that it takes, to millions of tokens."""
    header = {
        "title": "Time to read a text",
        "setting": f"models of the size {sizes.size}, random weights, {sizes.dtype}, one "
        f"sequence in segments of {sizes.segment} random tokens, chunks in the host's memory, one "
        "pass; peak GB: of the GPU, weights included",
        "unit": "s",
    }
    jobs = [
        timing({Cell(model, str(T)): {"T": T}}, partial(_reading_timer, sizes, model), "seconds")
        for T in sizes.texts
        for model in READING
    ]
    return header, jobs


def _reading_timer(
    sizes: Sizes, model: str, device: torch.device
) -> Callable[[int], list[Reading]]:
    lm = _reader(sizes, model, True, device)
    return lambda T: [time_reading(lm, T, sizes.segment)]


def _reader(sizes: Sizes, model: str, offload: bool, device: torch.device) -> LM:
    """Return a model with random weights, that keeps chunks in the host's memory if asked for."""
    s = SIZES[sizes.size]()
    config = model_config(model, replace(s, drt=replace(s.drt, offload=offload)))
    return build_model(config, device, decodes=True)


def model_config(model: str, s: Hyperparameters) -> LMConfig:
    """Return a model by the paper's name, with the sizes of recipes."""
    drt = s.drt
    if model == FULL:
        mixers = (AttentionConfig(drt.head_dim),) * drt.num_layers
        return LMConfig(
            s.vocab_size, s.d_model, mixers, MLPConfig("swiglu", drt.hidden), drt.norm_eps
        )
    baselines = {LANDMARK: landmark_lm, BLOCK_RECURRENT: block_recurrent_lm}
    names = {WINDOW: "base", PLAIN: "base", BASE: "base", DRT1: "drt1", DRT2: "drt2"}
    return (baselines.get(model) or ARCHITECTURES[names[model]])(s)


SPEEDS = Speeds(
    {"inference": inference, "length": length, "training_speed": training, "reading": reading},
    PAPER,
    DRY,
    prefix="",
)
