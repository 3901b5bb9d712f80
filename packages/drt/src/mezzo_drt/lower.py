"""The lower half: window attention as in the paper, or mixers of any package."""

from collections.abc import Sequence
from itertools import repeat
from typing import Any, cast

import torch
from mezzo_core.nn import AttentionConfig, MixerBlockConfig
from mezzo_core.nn.block import Block
from mezzo_core.nn.configs import MixerConfig
from mezzo_core.nn.contract import AbstractMixer
from mezzo_core.nn.mlp import MLPConfig
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mezzo_drt.places import Places


class LowerLayers(nn.ModuleList):
    """Blocks, one after another, which run over the landmarks too.

    Attributes:
        num_mixers: how many layers have a mixer other than window attention: all or none.
    """

    def __init__(
        self,
        d_model: int,
        num_layers: int,
        mixers: Sequence[MixerConfig],
        window: AttentionConfig,
        mlp: MLPConfig,
        norm_eps: float,
    ) -> None:
        """Create the blocks.

        Raises:
            ValueError: if the number of mixers is not that of layers or 0, or one refuses the
                width.
            TypeError: if one of `mixers` builds no mixer, or one that overrides `before_step`.
        """
        if len(mixers) not in (0, num_layers):
            raise ValueError(
                f"lower must have one mixer for each of {num_layers} lower layers, or none, "
                f"got {len(mixers)}"
            )
        each = mixers or repeat(window, num_layers)  # not a list: a file may ask for 10^9 layers
        super().__init__(MixerBlockConfig(mixer, mlp, norm_eps).build(d_model) for mixer in each)
        self.num_mixers = len(mixers)
        for i, block in enumerate(self.blocks):
            if type(block.mixer).before_step is not AbstractMixer.before_step:
                raise TypeError(
                    f"lower[{i}] must not override before_step, because landmarks are steps that "
                    f"run inside before_step, got {type(mixers[i]).__name__}"
                )

    @property
    def blocks(self) -> Sequence[Block]:
        """The layers; torch's ModuleList has no element type."""
        return cast(Sequence[Block], tuple(self))

    def forward(self, h: Tensor, states: Sequence[Any], places: Places) -> tuple[Tensor, list[Any]]:
        """Map the residual stream at all places of a call, (B, P, C) to (B, P, C)."""
        after = []
        for block, state in zip(self.blocks, states, strict=True):
            h, new = block(h, state, cu_seqlens=places.cu_seqlens, lengths=places.lengths)
            after.append(new)
        return h, after

    def step(self, h: Tensor, states: Sequence[Any]) -> Tensor:
        """Run one place of every row, (B, 1, C) to (B, 1, C), overwriting the layers' states."""
        for block, state in zip(self.blocks, states, strict=True):
            h = block.step(h, state)
        return h

    def keep(self, states: Sequence[Any]) -> list[Any]:
        """Return a copy of the mixers' states, for `put_back_`."""
        return [tree_map(torch.clone, state) for state in states[: self.num_mixers]]

    def put_back_(self, states: Sequence[Any], kept: Sequence[Any], rows: Tensor) -> None:
        """Undo the last step in the rows (B,) bool.

        For window attention it is enough to set its lengths back: the next step overwrites the slot
        that this one wrote, and in a full ring the token that was there has left the window anyway.
        The states of other mixers are restored from `kept`.
        """
        for now, old in zip(tree_leaves(states[: self.num_mixers]), tree_leaves(kept), strict=True):
            now.copy_(torch.where(rows.view(-1, *[1] * (now.ndim - 1)), old, now))
        for window in states[self.num_mixers :]:
            window.lengths.sub_(rows.long())
