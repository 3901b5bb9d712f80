"""The shapes of the speed tables, the paper's and a rehearsal's, and the selection of a part."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from mezzo_core.errors import UserError, nearest
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.contract import MixerConfig

from mezzo_rat.linear_rnn import LinearRNNConfig
from mezzo_rat.mixer import RATConfig
from mezzo_rat.recipes import PAPER_NAMES

MODELS = ("attention", "rat_l16", "attention_swa", "rat_swa", "rnn")
"""The architectures whose throughput the paper prints, by the recipes' names."""


def paper_layers(head_dim: int) -> dict[str, MixerConfig]:
    """Return the layers of Tables 6 to 8, by the paper's names, in its order."""
    return {
        "RNN": LinearRNNConfig(),
        "RAT(L=128)": RATConfig(chunk_size=128, head_dim=head_dim),
        "RAT(L=64)": RATConfig(chunk_size=64, head_dim=head_dim),
        "RAT(L=16)": RATConfig(chunk_size=16, head_dim=head_dim),
        "Attention": AttentionConfig(head_dim=head_dim),
    }


@dataclass(frozen=True)
class SpeedShapes:
    """The sizes of all speed tables.

    Attributes:
        device: "cuda", or "cpu" for a rehearsal.
        d_model, head_dim: C and D of the layers of Tables 6 to 8.
        tokens: of a batch in Tables 6 and 7, for every T.
        lengths: T of Tables 6 and 7; some are shorter than the paper's, as attention may win there.
        positions: of the token that Table 8 generates.
        batches: B of Table 8.
        contexts: T of Figure 5, and the size whose recipes give the models. The shortest is
            Table 1's, the longest Table 11's.
        new_tokens: of each sequence in Figure 5, after a prompt of T - new_tokens.
        prefill_tokens: about how many tokens are prefilled at once; more would only cost memory.
        max_batch: of Figure 5; for a model with a small state, a larger batch no longer helps.
        passes: timings of each cell, one after another.
        seconds: for each timing.
        memory: bytes that a state may take; None: what is free on the GPU.
    """

    device: str
    d_model: int
    head_dim: int
    tokens: int
    lengths: tuple[int, ...]
    positions: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: Mapping[int, str]
    new_tokens: int
    prefill_tokens: int
    max_batch: int
    passes: int
    seconds: float
    memory: int | None = None

    def check_device(self) -> torch.device:
        """Return the device; raise a UserError if this machine has no such device."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("the paper's speed tables need a CUDA GPU, and torch sees none here")
        return torch.device(self.device)

    def free_memory(self) -> int:
        """Return the bytes that a state may take; a margin is left for everything else."""
        if self.memory is not None:
            return self.memory
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return free - total // 50


FULL = SpeedShapes(
    device="cuda",
    d_model=2048,
    head_dim=128,
    tokens=262_144,
    lengths=tuple(2**i for i in range(10, 19)),
    positions=tuple(2**i for i in range(12, 19)),
    batches=(64, 512, 1024),
    contexts={4096: "1p3b", 8192: "1p3b", 16_384: "1p3b_16k"},
    new_tokens=1024,
    prefill_tokens=16_384,
    max_batch=4096,
    passes=3,
    seconds=0.05,
)
DRY = SpeedShapes(
    device="cpu",
    d_model=32,
    head_dim=8,
    tokens=256,
    lengths=(64, 128),
    positions=(64, 128),
    batches=(2, 512),
    contexts={32: "tiny", 48: "tiny"},
    new_tokens=8,
    prefill_tokens=64,
    max_batch=16,
    passes=3,
    seconds=0.0,
    memory=4_000_000,
)
"""A rehearsal on a CPU: the same steps at toy sizes; one cell of attention is out of memory."""

TABLES = ("table6", "table7", "table8", "fig5")
NAMES = (*paper_layers(head_dim=1), *(PAPER_NAMES[name] for name in MODELS if "swa" in name))
"""Every model of the speed tables, as the paper calls it."""


@dataclass(frozen=True)
class Selection:
    """A part of the speed tables; an empty field selects everything.

    Attributes:
        only: of TABLES.
        lengths: T of Tables 6 and 7, positions of Table 8, and contexts of Figure 5.
        models: by the paper's names.
    """

    only: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    models: tuple[str, ...] = ()

    def check(self, shapes: SpeedShapes) -> None:
        """Raise a UserError that names the first table, model or length that is unknown."""
        lengths = {*shapes.lengths, *shapes.positions, *shapes.contexts}
        for name in self.only:
            if name not in TABLES:
                raise UserError(f"no speed table is named {name!r}{nearest(name, TABLES)}")
        for model in self.models:
            if model not in NAMES:
                raise UserError(f"no model is named {model!r}{nearest(model, NAMES)}")
        for length in self.lengths:
            if length not in lengths:
                known = ", ".join(map(str, sorted(lengths)))
                raise UserError(f"no speed table has the length {length}, only {known}")

    def table(self, name: str) -> bool:
        """Tell whether a table is wanted."""
        return not self.only or name in self.only

    def length(self, length: int) -> bool:
        """Tell whether a length is wanted."""
        return not self.lengths or length in self.lengths

    def model(self, name: str) -> bool:
        """Tell whether a model is wanted."""
        return not self.models or name in self.models
