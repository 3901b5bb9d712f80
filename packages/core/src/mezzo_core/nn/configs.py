"""Protocols of configurations: frozen dataclasses that describe a sequence module and build it."""

from typing import Protocol

from mezzo_core.nn.contract import AbstractBlock, AbstractMixer, AbstractStack


class MixerConfig(Protocol):
    """A frozen dataclass that describes a mixer and builds it."""

    def build(self, d_model: int) -> AbstractMixer:
        """Build the mixer, on torch's default device."""
        ...


class BlockConfig(Protocol):
    """A frozen dataclass that describes a block and builds it."""

    def build(self, d_model: int) -> AbstractBlock:
        """Build the block, on torch's default device."""
        ...


class StackConfig(Protocol):
    """A frozen dataclass that describes a stack and builds it."""

    def build(self, d_model: int) -> AbstractStack:
        """Build the stack, on torch's default device."""
        ...
