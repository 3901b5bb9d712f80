"""The plain stack: blocks, one after another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from mezzo_core.config_json import check_fields
from mezzo_core.nn.configs import BlockConfig
from mezzo_core.nn.contract import (
    AbstractBlock,
    AbstractSequenceModule,
    AbstractStack,
    Run,
    run_eagerly,
)
from mezzo_core.nn.state import Rows


@dataclass(frozen=True)
class BlocksConfig:
    """Describes a `Stack` of blocks.

    Attributes:
        blocks: one configuration for each layer; the layers may be of different kinds.
    """

    blocks: tuple[BlockConfig, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.blocks:
            raise ValueError("blocks must have one item a layer, got none")

    def build(self, d_model: int) -> "Stack":
        """Build the stack, on torch's default device.

        Raises:
            ValueError: if a block does not support this width.
            TypeError: if one of `blocks` does not build a block.
        """
        blocks = []
        for i, config in enumerate(self.blocks):
            block = config.build(d_model)
            if not isinstance(block, AbstractBlock):
                raise TypeError(f"blocks[{i}] builds no block, it is {type(config).__name__}")
            blocks.append(block)
        return Stack(blocks, d_model)


class Stack(AbstractStack):
    """Blocks, one after another. The state is a tuple of the blocks' states."""

    def __init__(self, blocks: Sequence[AbstractBlock], d_model: int) -> None:
        super().__init__()
        self.d_model = d_model
        # torch's ModuleList has no element type, so the cast tells it to type checkers.
        self.blocks = cast(Sequence[AbstractBlock], nn.ModuleList(blocks))

    def forward(
        self,
        x: Tensor,
        state: tuple[Any, ...] | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Any, ...] | None]:
        """Map (B, T, C) to (B, T, C); each block checks its arguments."""
        before = (None,) * len(self.blocks) if state is None else state
        after = []
        for block, its_state in self._pairs(before):
            x, new = block(x, its_state, cu_seqlens=cu_seqlens, lengths=lengths)
            after.append(new)
        return x, None if state is None else tuple(after)

    def look_ahead(
        self, x: Tensor, state: tuple[Any, ...], lengths: Tensor, certain: Tensor
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Look ahead in block after block."""
        after = []
        for block, its_state in self._pairs(state):
            x, new = block.look_ahead(x, its_state, lengths, certain)
            after.append(new)
        return x, tuple(after)

    def step(self, x: Tensor, state: tuple[Any, ...]) -> Tensor:
        """Decode one token of every row, (B, 1, C) to (B, 1, C), overwriting the state in place."""
        self.check_step(x, state)
        for block, its_state in self._pairs(state):
            x = block.step(x, its_state)
        return x

    def check_step(self, x: Tensor, state: tuple[Any, ...]) -> None:
        """Check the arguments of every block's `step`, before any block changes its state."""
        for block, its_state in self._pairs(state):
            block.check_step(x, its_state)

    def before_step(self, state: tuple[Any, ...], run: Run = run_eagerly) -> None:
        """Call `before_step` of every block."""
        for block, its_state in self._pairs(state):
            block.before_step(its_state, run)

    def reserve(self, state: tuple[Any, ...], num_tokens: int) -> tuple[Any, ...]:
        """Return the state with room for `num_tokens` more tokens of every row, for `step`."""
        return tuple(block.reserve(its, num_tokens) for block, its in self._pairs(state))

    def copy_rows(self, state: tuple[Any, ...], rows: Tensor | None) -> tuple[Any, ...]:
        """Return a copy of every block's state."""
        return tuple(block.copy_rows(its, rows) for block, its in self._pairs(state))

    def reset(self, state: tuple[Any, ...], rows: Rows) -> tuple[Any, ...]:
        """Return a state in which some rows are before their first token, in every block."""
        return tuple(block.reset(its, rows) for block, its in self._pairs(state))

    def overwritten(self) -> tuple[bool, ...]:
        """Tell it of every block's state in turn."""
        return tuple(on for block in self.blocks for on in block.overwritten())

    def init_state(self, batch: int) -> tuple[Any, ...]:
        """Return every block's state before the first token."""
        return tuple(block.init_state(batch) for block in self.blocks)

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of state that one sequence needs after `num_tokens` tokens."""
        return sum(block.state_bytes(num_tokens) for block in self.blocks)

    def host_state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of state that the blocks keep in the host's memory."""
        return sum(block.host_state_bytes(num_tokens) for block in self.blocks)

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs per token of all blocks."""
        return sum(block.flops_per_token(num_tokens) for block in self.blocks)

    def units(self) -> Sequence[nn.Module]:
        """Return every block's units."""
        return tuple(unit for block in self.blocks for unit in block.units())

    def stages(self) -> Sequence[AbstractSequenceModule]:
        """Return the blocks."""
        return self.blocks

    def _pairs(self, state: Any) -> Iterator[tuple[AbstractBlock, Any]]:
        """Return each block with its state."""
        if not isinstance(state, tuple) or len(state) != len(self.blocks):
            got = len(state) if isinstance(state, tuple) else type(state).__name__
            raise ValueError(f"state must hold {len(self.blocks)} blocks' states, got {got}")
        return zip(self.blocks, state, strict=True)
