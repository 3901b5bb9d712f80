"""fla (flash-linear-attention), the library of the paper's authors, where it is installed.

Only the benchmarks use it, to compare with our ops and layers.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

from mezzo_core.errors import UserError
from mezzo_core.nn.block import Block
from mezzo_core.nn.lm import LM
from mezzo_core.reproduction.layer_speed import Layer
from torch import Tensor, nn

from mezzo_gsa.gsa import GSA


def runs_on(device: str) -> bool:
    """Tell whether fla can be measured: it is installed, and its kernels have a GPU."""
    return device == "cuda" and importlib.util.find_spec("fla") is not None


def title(*words: str) -> str:
    """Return the name of a row of fla: its version, and further words."""
    from fla import __version__

    return ", ".join((f"fla {__version__}", *words))


def gsa_op(scale: float, *, keep_states: bool) -> Callable[..., Tensor]:
    """Return fla's chunk_gsa of q, k, v and log gates, as our op is called.

    Its write strengths s = 1 - exp(g) are an argument, so computing them is not timed.
    """
    from fla.ops.gsa import chunk_gsa

    level = 0 if keep_states else 2

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, s: Tensor) -> Tensor:
        return chunk_gsa(q, k, v, s, g, scale=scale, checkpoint_level=level)[0]

    return run


def gla_op(scale: float) -> Callable[..., Tensor]:
    """Return fla's chunk_gla."""
    from fla.ops.gla import chunk_gla

    return lambda q, k, v, g: chunk_gla(q, k, v, g, scale=scale)[0]


class FlaMixer(nn.Module):
    """A layer of fla with the interface of a mixer, for training only."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, state: None = None, **_: Any) -> tuple[Tensor, None]:
        """Mix (B, T, C) along time."""
        return self.layer(x)[0], None


def layers(d_model: int, num_heads: int, num_slots: int, like: Tensor) -> dict[str, Layer]:
    """Return fla's layers of the paper's models, alone, of the dtype and device of a tensor.

    Raises:
        UserError: if a library that fla's layers need is not installed.
    """
    try:
        from fla.layers import (
            GatedLinearAttention,
            GatedSlotAttention,
        )
    except ImportError as error:
        raise UserError(f"fla's layers cannot be imported: {error}") from error

    shared = {"hidden_size": d_model, "num_heads": num_heads, "layer_idx": 0}
    with like.device:
        theirs = {
            "gsa": GatedSlotAttention(num_slots=num_slots, **shared),
            "gla": GatedLinearAttention(**shared),
        }
    return {
        name: Layer(FlaMixer(layer), d_model, alone=True).to(like)  # type: ignore[arg-type]
        for name, layer in theirs.items()
    }


def step(layer: Layer, prompt: Tensor, x: Tensor) -> Callable[[], Any]:
    """Return a function that decodes x (1, 1, C) after a prompt (1, T, C)."""
    from fla.models.utils import Cache

    theirs, cache = layer.mixer.layer, Cache()
    assert isinstance(theirs, nn.Module)
    theirs(prompt, past_key_values=cache, use_cache=True)
    return lambda: theirs(x, past_key_values=cache, use_cache=True)[0]


def replace_mixers(model: LM) -> None:
    """Replace the mixers of a GSA model by fla's layers."""
    for block in [part for part in model.modules() if isinstance(part, Block)]:
        ours = block.mixer
        assert isinstance(ours, GSA)
        sizes = (ours.d_model, ours.config.num_heads, ours.config.num_slots)
        theirs = layers(*sizes, like=model.embed.weight)["gsa"]
        block.mixer = theirs.mixer  # type: ignore[assignment]
