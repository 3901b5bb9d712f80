"""The small model that MQAR is asked of: an embedding, mixers behind norms, a tied head."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import cast

import torch.nn.functional as F
from mezzo_core.nn import AbstractMixer, AttentionConfig, MixerConfig, init_weights
from torch import Tensor, nn

from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.hgrn2 import HGRN2Config, lower_bounds
from mezzo_gsa.retnet import RetNetConfig

DROPOUT = 0.1
"""Of the embeddings."""


def _attention(d_model: int, bound: float) -> MixerConfig:
    return AttentionConfig(head_dim=d_model, rope_base=None)


def _gsa(d_model: int, bound: float) -> MixerConfig:
    return GSAConfig(num_heads=4)  # as in the paper's 1.3B model


def _gsa_one_head(d_model: int, bound: float) -> MixerConfig:
    return GSAConfig(num_heads=1)


def _gla(d_model: int, bound: float) -> MixerConfig:
    return GLAConfig(num_heads=1)


def _hgrn2(d_model: int, bound: float) -> MixerConfig:
    # Wider models have several heads: its state is head_dim * C whatever their number.
    return HGRN2Config(head_dim=min(d_model, 128), lower_bound=bound)


def _retnet(d_model: int, bound: float) -> MixerConfig:
    return RetNetConfig(num_heads=1)


MIXERS: dict[str, Callable[[int, float], MixerConfig]] = {
    "attention": _attention,
    "gsa": _gsa,
    "gsa_one_head": _gsa_one_head,
    "gla": _gla,
    "hgrn2": _hgrn2,
    "retnet": _retnet,
}
"""The mixer of each name, from the model's width and the layer's lower bound of HGRN2's gates."""


class RecallModel(nn.Module):
    """A model that answers the questions of a row.

    As Zoology's protocol has it: each layer is `x + mixer(norm x)` and nothing else, the norms are
    LayerNorms, the head shares the embedding's weight, and attention alone, which has
    no other way to tell a token's neighbours, adds a learned embedding of the position. As its
    newer protocol has it, the first layer may be a short convolution along time instead.
    """

    def __init__(
        self,
        mixers: Sequence[AbstractMixer],
        d_model: int,
        *,
        vocab_size: int,
        num_positions: int | None,
        conv_width: int = 0,
        fan_in: bool = False,
    ) -> None:
        """Draw the weights by `init_weights`; `num_positions` is None for no such embedding.

        `conv_width` tokens are in the convolution before the mixers; 0: there is none. `fan_in`
        draws the mixers' matrices with a deviation of columns^-1/2 instead.
        """
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.embed_position = nn.Embedding(num_positions, d_model) if num_positions else None
        self.dropout = nn.Dropout(DROPOUT)
        self.conv = ShortConv(d_model, conv_width) if conv_width else None
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in mixers)
        self.mixers = cast(Sequence[AbstractMixer], nn.ModuleList(mixers))
        self.last_norm = nn.LayerNorm(d_model)
        init_weights(self)
        if fan_in:
            for layer in chain.from_iterable(mixer.modules() for mixer in mixers):
                if isinstance(layer, nn.Linear):
                    nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Answer at some positions: the head is most of the model, and its other logits unused.

        Args:
            tokens: (B, T) int64.
            positions: (B, P) int64, in [0, T).

        Returns:
            logits (B, P, vocab).
        """
        x = self.embed(tokens)
        if self.embed_position is not None:
            x = x + self.embed_position.weight[: tokens.shape[1]]
        x = self.dropout(x)
        if self.conv is not None:
            x = x + self.conv(x)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))[0]
        asked = x.gather(1, positions[:, :, None].expand(-1, -1, x.shape[-1]))
        return F.linear(self.last_norm(asked), self.embed.weight)

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of state that one row needs after `num_tokens` tokens."""
        conv = 0 if self.conv is None else self.conv.state_bytes()
        return conv + sum(mixer.state_bytes(num_tokens) for mixer in self.mixers)


class ShortConv(nn.Module):
    """LayerNorm, then a causal convolution of each channel over the last `width` tokens."""

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.conv = nn.Conv1d(d_model, d_model, width, groups=d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Mix (B, T, C) along time."""
        past = self.conv.kernel_size[0] - 1
        return self.conv(F.pad(self.norm(x).transpose(1, 2), (past, 0))).transpose(1, 2)

    def state_bytes(self) -> int:
        """Return the bytes of one row's tokens that the next one needs."""
        weight = self.conv.weight
        return weight.shape[0] * (weight.shape[2] - 1) * weight.element_size()


def build_model(
    name: str,
    d_model: int,
    *,
    vocab_size: int,
    seq_len: int,
    num_layers: int,
    conv_width: int = 0,
    fan_in: bool = False,
) -> RecallModel:
    """Build the model whose mixers are named so in `MIXERS`, on torch's default device.

    A convolution of `conv_width` tokens, if that is not 0, is the first of its layers; for
    `fan_in` see `RecallModel`.

    Raises:
        ValueError: if the mixer cannot have this width.
    """
    bounds = lower_bounds(num_layers)[1 if conv_width else 0 :]
    return RecallModel(
        [MIXERS[name](d_model, bound).build(d_model) for bound in bounds],
        d_model,
        vocab_size=vocab_size,
        num_positions=seq_len if name == "attention" else None,
        conv_width=conv_width,
        fan_in=fan_in,
    )
