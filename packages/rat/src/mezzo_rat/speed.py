"""The paper's speeds: Tables 6, 7 and 8 (one layer), Figure 5 (generation by whole models).

Each is measured into `speed_NAME.json` below a folder.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from mezzo_core.bench import Timing, attempt, start_afresh
from mezzo_core.bench.generation import time_step, time_throughput
from mezzo_core.bench.layer import build_layer, check_layer, check_mixers, compiled, time_layer
from mezzo_core.bench.result import Say
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.contract import MixerConfig
from mezzo_core.papers.measurement import Measurement
from mezzo_core.papers.speeds import AbstractSizes, Measurers, as_measured, open_speeds

from mezzo_rat.linear_rnn import LinearRNNConfig
from mezzo_rat.mixer import RATConfig
from mezzo_rat.recipes import PAPER_NAMES, recipe


def paper_layers(head_dim: int) -> dict[str, MixerConfig]:
    """Return the layers of Tables 6 to 8, by the paper's names, in its order."""
    return {
        "RNN": LinearRNNConfig(),
        "RAT(L=128)": RATConfig(chunk_size=128, head_dim=head_dim),
        "RAT(L=64)": RATConfig(chunk_size=64, head_dim=head_dim),
        "RAT(L=16)": RATConfig(chunk_size=16, head_dim=head_dim),
        "Attention": AttentionConfig(head_dim=head_dim),
    }


LAYERS = tuple(paper_layers(head_dim=1))
GENERATING = {
    PAPER_NAMES[name]: name for name in ("attention", "rat_l16", "attention_swa", "rat_swa", "rnn")
}
"""The models whose throughput the paper prints, with the recipes' names."""


@dataclass(frozen=True)
class Sizes(AbstractSizes):
    """The sizes of all speed tables.

    Attributes:
        d_model, head_dim: C and D of the layers of Tables 6 to 8.
        tokens: of a batch in Tables 6 and 7, for every T.
        lengths: T of Tables 6 and 7; some are shorter than the paper's, as attention may win there.
        positions: of the token that Table 8 generates.
        batches: B of Table 8.
        contexts: T of Figure 5, and the size whose recipes give the models. The first is that of
            Table 1, the last that of Table 11.
        new_tokens: of each sequence in Figure 5, after a prompt of T - new_tokens.
        max_batch: of Figure 5; for a model with a small state, a larger batch no longer helps.
        seconds: for each timing.
    """

    d_model: int
    head_dim: int
    tokens: int
    lengths: tuple[int, ...]
    positions: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: Mapping[int, str]
    new_tokens: int
    max_batch: int
    seconds: float


FULL = Sizes(
    device="cuda",
    d_model=2048,
    head_dim=128,
    tokens=262_144,
    lengths=tuple(2**i for i in range(10, 19)),
    positions=tuple(2**i for i in range(12, 19)),
    batches=(64, 512, 1024),
    contexts={4096: "1p3b", 8192: "1p3b", 16_384: "1p3b_16k"},
    new_tokens=1024,
    max_batch=4096,
    seconds=0.05,
)
CPU = Sizes(
    device="cpu",
    d_model=128,
    head_dim=32,
    tokens=4096,
    lengths=(512, 1024, 2048, 4096),
    positions=(512, 1024, 2048, 4096),
    batches=(64,),
    contexts={128: "tiny", 512: "tiny"},
    new_tokens=32,
    max_batch=16,
    seconds=0.02,
)
DRY = Sizes(
    *(32, 8, 128, (64, 128), (64, 128), (2, 64), {32: "tiny", 48: "tiny"}, 4, 8, 0.0),
    device="cpu",
)
"""A rehearsal on a CPU: the same steps at toy sizes."""


def measure_layers(name: str, sizes: Sizes, folder: Path, say: Say) -> Measurement | None:
    """Measure "table6" (training), "table7" (prefilling) or "table8" (decoding).

    Returns:
        What the file then has; None if none of its models is wanted.

    Raises:
        UserError: if a layer computes wrong results, which is then not timed, or the file cannot be
            written or continued.
    """
    cuda, decoding = sizes.device == "cuda", name == "table8"
    title, what = {
        "table6": ("Training time of one layer (Table 6)", "forward and backward"),
        "table7": ("Prefilling time of one layer (Table 7)", "forward"),
        "table8": ("Decoding time of one layer at a position (Table 8)", "one token at a position"),
    }[name]
    batch = "whole batch" if decoding else f"{sizes.tokens:,} tokens a batch"
    bf16 = "bf16, in a CUDA graph" if decoding else "bf16 autocast over float32, torch.compile"
    lengths = sizes.positions if decoding else sizes.lengths
    result = open_speeds(
        folder / f"speed_{name}.json",
        sizes,
        FULL,
        say,
        title=title,
        setting=f"{what} of one layer (norm, mixer, residual), {batch}, "
        f"{bf16 if cuda else 'float32, eager'}, C = {sizes.d_model}, D = {sizes.head_dim}; "
        "medians of 3 passes",
        columns=tuple(map(str, lengths)),
        models=LAYERS,
        groups=tuple(f"B={B}" for B in sizes.batches) if decoding else (),
        unit="ms",
        better="lower",
    )
    cells = [(f"B={B}", B, T) for B in sizes.batches for T in lengths]
    if not decoding:
        cells = [("", max(1, sizes.tokens // T), T) for T in lengths]
    for model, config in paper_layers(sizes.head_dim).items():
        missing = [cell for cell in cells if not result.has(model, str(cell[2]), cell[0])]
        if not (missing and sizes.wants(model)):
            continue
        start_afresh()
        layer = build_layer(config, sizes.d_model, torch.device(sizes.device))
        check_layer(layer)
        time: Callable[..., list[Timing]]
        if decoding:
            time = partial(time_step, layer.bfloat16() if cuda else layer)
        else:
            phase: Literal["train", "forward"] = "train" if name == "table6" else "forward"
            time = partial(time_layer, layer, compiled(layer), phase)
        for group, B, T in missing:
            passes = attempt(partial(time, B, T, seconds=sizes.seconds))
            state_gb = B * layer.mixer.state_bytes(T) / 1e9 if decoding else None
            names = {"model": model, "column": str(T), "group": group}
            result.add_passes(passes, "ms", **names, B=B, state_gb=state_gb)
    return as_measured(result)


def measure_generation(sizes: Sizes, folder: Path, say: Say) -> Measurement | None:
    """Measure Figure 5: the most tokens a second that a whole model generates.

    The value leaves the time of the prompts out. So must the paper's, without saying so: its RNN's
    130,000 tokens a second after prompts of 15,360 would otherwise mean 2 million prompt tokens a
    second, five times what an H100's peak allows a model of 1.3B weights. `with_prompt` has it.

    Returns, raises: as `measure_layers`.
    """
    device = torch.device(sizes.device)
    recipes = ", ".join(sorted(set(sizes.contexts.values())))
    result = open_speeds(
        folder / "speed_fig5.json",
        sizes,
        FULL,
        say,
        title="Largest throughput of generation (Figure 5, Tables 1 and 11)",
        setting=f"{sizes.new_tokens} new tokens after a prompt of T - {sizes.new_tokens}, random "
        f"weights of the recipes {recipes}, {'bf16' if device.type == 'cuda' else 'float32'}, the "
        f"largest batch whose state fits (at most {sizes.max_batch}); greedy steps, in a CUDA "
        "graph on a GPU, timed at the first, middle and last position; the prompts' time is left "
        "out, as it must be in the paper's numbers, and is in the details; 3 passes",
        columns=tuple(f"T={T}" for T in sizes.contexts),
        models=tuple(GENERATING),
        unit="tokens a second",
        better="higher",
    )
    for T, size in sizes.contexts.items():
        for name, architecture in GENERATING.items():
            if result.has(name, f"T={T}") or not sizes.wants(name):
                continue
            start_afresh()
            config = recipe(size, architecture).model
            check_mixers(config, device)
            with device:
                model = config.build().eval()
            model = model.bfloat16() if device.type == "cuda" else model
            time = partial(time_throughput, max_batch=sizes.max_batch, seconds=sizes.seconds)
            passes = attempt(partial(time, model, T, sizes.new_tokens))
            result.add_passes(passes, "tokens_per_second", model=name, column=f"T={T}")
    return as_measured(result)


MEASURERS: Measurers = {
    **{name: partial(measure_layers, name) for name in ("table6", "table7", "table8")},
    "fig5": measure_generation,
}
"""What this module measures, by the names in the files' names."""
