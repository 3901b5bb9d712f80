"""All layers of a Recurrent Transformer at once: the wavefront."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

from mezzo_core.config_json import check_fields
from mezzo_core.nn import AbstractStack
from mezzo_core.nn.attention import KVCache, check_alike
from mezzo_core.nn.linear import is_unchanged
from mezzo_core.nn.stack import Stack
from mezzo_core.ops.checks import check_size
from torch import Tensor

from mezzo_recurrent_transformer.block import RecurrentBlock, RecurrentBlockConfig, run_layers
from mezzo_recurrent_transformer.layer import LayerConfig

Scaling = Literal["residual", "init"]


def scaled(layer: LayerConfig, num_layers: int, scaling: Scaling) -> Iterator[Any]:
    """Yield the configurations of `num_layers` layers, each scaled for that depth.

    Args:
        layer: what they have in common.
        num_layers: how many there are.
        scaling: "residual" multiplies both branches of a layer by 1 / sqrt(num_layers), as the
            paper says. "init" draws the weights that end a branch smaller, as its released code
            does.
    """
    check_size("scaled", "num_layers", num_layers)
    if scaling not in get_args(Scaling):
        raise ValueError(f"scaling must be one of {get_args(Scaling)}, got {scaling!r}")
    for i in range(num_layers):
        if scaling == "residual":
            yield replace(layer, residual_scale=num_layers**-0.5)
        else:
            yield replace(layer, residual_scale=1.0, init_layer=i)


@dataclass(frozen=True)
class RecurrentStackConfig:
    """Describes a `RecurrentStack`.

    Attributes:
        num_layers: the number of layers.
        block: what all layers have in common; `scaling` decides its residual_scale and init_layer.
        scaling: how the layers are scaled for the depth, see `scaled`.
    """

    num_layers: int
    block: RecurrentBlockConfig = field(default_factory=RecurrentBlockConfig)
    scaling: Scaling = "residual"

    def __post_init__(self) -> None:
        check_fields(self)
        next(scaled(self.block, self.num_layers, self.scaling))  # checks the values

    def blocks(self) -> tuple[RecurrentBlockConfig, ...]:
        """Return the configuration of each layer.

        `BlocksConfig(config.blocks())` builds a plain stack, with the same weights under the same
        names, which runs one layer after another.
        """
        return tuple(scaled(self.block, self.num_layers, self.scaling))

    def build(self, d_model: int) -> "RecurrentStack":
        """Build the stack, on torch's default device; a ValueError if head_dim does not divide."""
        # One at a time, so that `load_model` can stop at a number of layers that a file made up.
        layers = scaled(self.block, self.num_layers, self.scaling)
        return RecurrentStack([layer.build(d_model) for layer in layers], d_model)


class RecurrentStack(Stack):
    """Layers that run at once: while one works on a token, the next works on an earlier one.

    A layer needs at token t only its own outputs before t and the output of the layer below at t.
    So the layers form a wavefront along the sequence, and each product of a token becomes one
    batched product over all layers.
    """

    def forward(
        self,
        x: Tensor,
        state: tuple[KVCache, ...] | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, tuple[KVCache, ...] | None]:
        """Map (B, T, C) to (B, T, C); arguments and results as `AbstractStack.forward` says."""
        self.check_input(x, state, cu_seqlens, lengths)
        layers = cast(tuple[RecurrentBlock, ...], tuple(self.blocks))
        for i, layer in enumerate(layers):
            if type(layer).forward is not RecurrentBlock.forward or not is_unchanged(layer):
                raise TypeError(
                    f"blocks[{i}] must be a RecurrentBlock without hooks or a forward of its own, "
                    "because the stack uses its weights and does not call it"
                )
        return run_layers(layers, x, state, cu_seqlens, lengths)

    def check_step(self, x: Tensor, state: tuple[KVCache, ...]) -> None:
        """Check the arguments of every layer's `step`, and that the layers have the same tokens."""
        super().check_step(x, state)
        check_alike(state)

    # Its layers run together, and it calls none of them: it is one unit, and one stage.
    units = AbstractStack.units
    stages = AbstractStack.stages
