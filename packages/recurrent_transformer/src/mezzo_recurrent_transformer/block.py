"""One layer of the Recurrent Transformer, as a block."""

from dataclasses import dataclass
from typing import Any

import torch
from mezzo_core.nn import AbstractBlock
from mezzo_core.nn.attention import (
    KVCache,
    check_alike,
    check_cache,
    check_room,
    empty_cache,
    reserve_cache,
)
from mezzo_core.nn.linear import Linear, is_unchanged
from mezzo_core.nn.mlp import GELUMLP, MLPConfig
from mezzo_core.nn.norm import LayerNorm, RMSNorm, build_norm
from mezzo_core.ops.checks import check_size
from mezzo_core.ops.decode_attention import append_token_, decode_attention
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.positions import alibi_slopes
from torch import Tensor, nn

from mezzo_recurrent_transformer.layer import LayerConfig, init_as_released
from mezzo_recurrent_transformer.ops.recurrent_layers import LayerWeights, Past, recurrent_layers
from mezzo_recurrent_transformer.ops.recurrent_layers.api import RecurrentImpl


@dataclass(frozen=True)
class RecurrentBlockConfig(LayerConfig):
    """Describes a `RecurrentBlock`; see `LayerConfig` for its other attributes.

    Attributes:
        persistent_norm: whether the persistent pair is made from normalized outputs. False is the
            paper's ablation, which learns badly and only at small rates.
        block_size: b, the tokens that run at once: a token attends to the temporary pairs of its
            own block up to itself, and to the persistent pairs of the blocks before. 1 is the
            paper's model; with b as long as the sequence it is a Transformer.
    """

    persistent_norm: bool = True
    block_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("RecurrentBlockConfig", "block_size", self.block_size)

    def build(self, d_model: int) -> "RecurrentBlock":
        """Build the block, on torch's default device; a ValueError if head_dim does not divide."""
        return RecurrentBlock(d_model, self)


class RecurrentBlock(AbstractBlock):
    """A layer that attends to keys and values of its own outputs (section "The RT layer").

    For many layers, `RecurrentStackConfig` builds a stack that runs them at once: the same results
    in a fraction of the time.
    """

    state_type = KVCache

    def __init__(self, d_model: int, config: RecurrentBlockConfig) -> None:
        super().__init__()
        config.check_width(d_model)
        self.d_model = d_model
        self.config = config
        self.num_heads = d_model // config.head_dim

        def norm() -> nn.Module:
            return build_norm(config.norm, d_model, config.norm_eps)

        self.attention_norm = norm()
        self.wq, self.wk, self.wv, self.wo = (
            Linear(d_model, d_model, bias=False) for _ in range(4)
        )
        self.q_norm, self.k_norm = norm(), norm()
        self.mlp_norm = norm()
        self.mlp = GELUMLP(d_model, MLPConfig("gelu", config.hidden).hidden_width(d_model))

    def init_own_weights(self) -> None:
        """Draw the weights as the released code does, if `init_layer` asks for it."""
        if self.config.init_layer is not None:
            init_as_released(self, self.mlp, self.config.init_layer)

    def forward(
        self,
        x: Tensor,
        state: KVCache | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, KVCache | None]:
        """Map (B, T, C) to (B, T, C); arguments and results as `AbstractBlock.forward` says."""
        self.check_input(x, state, cu_seqlens, lengths)
        z, states = run_layers((self,), x, None if state is None else (state,), cu_seqlens, lengths)
        return z, None if states is None else states[0]

    def step(self, x: Tensor, state: KVCache) -> Tensor:
        """Decode one token of every row, (B, 1, C) to (B, 1, C), overwriting the state in place."""
        self.check_step(x, state)
        q, k, v = (part[:, 0] for part in self._project(self.attention_norm(x)))
        # The temporary pair takes the token's slot until its persistent pair is known.
        q = append_token_(q, k, v, *state, rope_base=None)
        out = decode_attention(q, *state, alibi_slopes=self.slopes())
        z = self._finish(x, out.to(x.dtype).flatten(1)[:, None])
        q, k, v = (part[:, 0] for part in self._project(self._persistent(z)))
        state.lengths.sub_(1)
        append_token_(q, k, v, *state, rope_base=None)
        return z

    def check_step(self, x: Tensor, state: KVCache) -> None:
        """Check the arguments of `step`, the room in the cache included."""
        _check_keeps_state(self.config)
        super().check_step(x, state)
        check_room(state)

    def init_state(self, batch: int) -> KVCache:
        """Return an empty cache for `batch` rows."""
        return empty_cache(batch, self.num_heads, self.config.head_dim, self.wk.weight)

    def reserve(self, state: KVCache, num_tokens: int) -> KVCache:
        """Return a copy of the cache with slots for `num_tokens` more tokens of every row."""
        self.check_reserve(state, num_tokens)
        return reserve_cache(state, num_tokens)

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of keys and values of one sequence."""
        return 2 * num_tokens * self.d_model * self.wk.weight.element_size()

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs per token: 2 a weight, and 4C for each key that it sees.

        The matrices of keys and values count twice, for the temporary and the persistent pair.
        """
        matrices = [part for part in self.modules() if isinstance(part, nn.Linear)]
        weights = sum(m.weight.numel() for m in (*matrices, self.wk, self.wv))
        return 2 * weights + 4 * self.d_model * (num_tokens + 1) / 2

    def slopes(self) -> Tensor:
        """Return the ALiBi slopes (H,), zeros without ALiBi, on the device of the weights."""
        device, dtype = self.wk.weight.device, accumulation_dtype(self.wk.weight.dtype)
        if self.config.alibi is None:
            return torch.zeros(self.num_heads, device=device, dtype=dtype)
        return alibi_slopes(self.num_heads, self.config.alibi, device=device, dtype=dtype)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v (B, T, H, D) of normalized x."""
        heads = (self.num_heads, self.config.head_dim)
        q, k = self.q_norm(self.wq(x)), self.k_norm(self.wk(x))
        return q.unflatten(-1, heads), k.unflatten(-1, heads), self.wv(x).unflatten(-1, heads)

    def _finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add attention (B, T, C) and the MLP to the residual stream."""
        r = self.config.residual_scale
        h = x + r * self.wo(attended)
        return h + r * self.mlp(self.mlp_norm(h))

    def _persistent(self, z: Tensor) -> Tensor:
        return self.attention_norm(z) if self.config.persistent_norm else z


def run_layers(
    layers: tuple[RecurrentBlock, ...],
    x: Tensor,
    states: tuple[KVCache, ...] | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
    *,
    impl: RecurrentImpl = "auto",
) -> tuple[Tensor, tuple[KVCache, ...] | None]:
    """Run layers of one configuration, all at once; arguments as `AbstractStack.forward` says."""
    first = layers[0]
    config = first.config
    past = None
    if states is not None:
        _check_keeps_state(config)
        check_cache(states[0])
        check_alike(states)
        k = torch.stack([state.k for state in states])
        v = torch.stack([state.v for state in states])
        past = Past(k, v, states[0].lengths)
    z, after = recurrent_layers(
        x,
        stack_weights(layers),
        num_heads=first.num_heads,
        residual_scale=config.residual_scale,
        norm=config.norm,
        eps=config.norm_eps,
        persistent_norm=config.persistent_norm,
        block_size=config.block_size,
        alibi_slopes=first.slopes(),
        past=past,
        cu_seqlens=cu_seqlens,
        lengths=lengths,
        impl=impl,
    )
    if after is None:
        return z, None
    return z, tuple(
        KVCache(k, v, after.lengths.clone()) for k, v in zip(after.k, after.v, strict=True)
    )


def stack_weights(layers: tuple[RecurrentBlock, ...]) -> LayerWeights:
    """Return the layers' weights, stacked; gradients flow back to each layer's own.

    Raises:
        TypeError: if a part of a layer has a bias, hooks or a forward of its own.
    """
    for layer in layers:
        _check_parts(layer)

    def stacked(name: str) -> Tensor:
        return torch.stack([_weight(layer.get_submodule(name)) for layer in layers])

    has_norms = layers[0].config.norm != "none"
    return LayerWeights(
        wq=stacked("wq"),
        wk=stacked("wk"),
        wv=stacked("wv"),
        wo=stacked("wo"),
        up=stacked("mlp.up"),
        down=stacked("mlp.down"),
        n1=stacked("attention_norm") if has_norms else None,
        n2=stacked("mlp_norm") if has_norms else None,
        q_norm=stacked("q_norm") if has_norms else None,
        k_norm=stacked("k_norm") if has_norms else None,
    )


def _weight(part: Any) -> Tensor:
    """Return a part's weight, dequantized, or the one of a part and its adapter together."""
    if not _is_adapted(part):
        # It need not be a parameter: torch.func and parametrizations have plain tensors.
        weight = part.weight
        is_quantized = type(weight).dequantize is not Tensor.dequantize  # by torchao
        return weight.dequantize() if is_quantized else weight
    weight = part.base_layer.weight
    identity = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    with torch.autocast(weight.device.type, enabled=False):
        return part(identity).T


def _is_adapted(part: nn.Module) -> bool:
    """Tell whether PEFT has put an adapter around a part, which is then its `base_layer`."""
    return isinstance(part._modules.get("base_layer"), nn.Linear)


_LINEAR = (Linear.forward, nn.Linear.forward)
_NORMS = {
    "rms": (RMSNorm.forward, nn.RMSNorm.forward),
    "layer": (LayerNorm.forward, nn.LayerNorm.forward),
    "none": (nn.Identity.forward,),
}


def _check_keeps_state(config: RecurrentBlockConfig) -> None:
    if config.block_size != 1:  # a cache has no temporary pairs of the open block
        raise ValueError(
            f"a layer of block_size {config.block_size} keeps no state: it reads whole sequences, "
            "and cannot decode"
        )


def _check_parts(layer: RecurrentBlock) -> None:
    """Check that each part computes what the op does with its weight: the op never calls it."""
    _check_part("mlp", layer.mlp, (GELUMLP.forward,))
    for name in ("wq", "wk", "wv", "wo", "mlp.up", "mlp.down"):
        part = layer.get_submodule(name)
        if _is_adapted(part):
            _check_adapter(name, part)
        else:
            _check_part(name, part, _LINEAR)
    for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm"):
        _check_part(name, layer.get_submodule(name), _NORMS[layer.config.norm])


def _check_adapter(name: str, part: nn.Module) -> None:
    """Check that an adapter multiplies every token by the same matrix."""
    for inner in part.modules():
        if inner._parameters.get("bias") is not None:
            raise TypeError(f"{name} must have no bias, its adapter's neither")
        if isinstance(inner, nn.Dropout) and inner.p > 0 and inner.training:
            raise TypeError(
                f"{name}: recurrent layers use an adapter's weight, which a dropout does not have: "
                "lora_dropout must be 0"
            )


def _check_part(name: str, part: nn.Module, forwards: tuple[Any, ...]) -> None:
    # Pruning and the old weight_norm set it in a hook before the forward, which is never called.
    if "weight" in part.__dict__:  # torch 2.8 cannot trace vars()
        raise TypeError(f"{name}.weight is set by a hook: use torch.nn.utils.parametrize")
    has_bias = part._parameters.get("bias") is not None
    if has_bias or type(part).forward not in forwards or not is_unchanged(part):
        raise TypeError(
            f"{name} must have no hooks, no bias and no forward of its own, "
            "because recurrent layers use its weight and do not call it"
        )
