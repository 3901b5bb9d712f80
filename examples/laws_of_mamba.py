"""Which laws does transformers' Mamba keep? Its state is the tensors of transformers' cache."""

from typing import Any

import torch
from mezzo_core.nn import AbstractStack
from mezzo_core.testing.laws import LAWS, broken_laws
from torch import Tensor
from transformers import MambaConfig, MambaModel

SIZES = {"vocab_size": 2, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 1}


class Mamba(AbstractStack):
    def __init__(self) -> None:
        super().__init__()
        self.d_model = 8
        self.model = MambaModel(MambaConfig(**SIZES, initializer_range=0.5))

    def begun(self, x: Tensor) -> tuple[Any, list[tuple[Any, Any]]]:
        cache = self.model(None, x.new_zeros(len(x), 4, 8), use_cache=True)[1]
        parts = [vars(layer) for layer in cache.layers]
        keys = [(part, name) for part in parts for name in ("conv_states", "recurrent_states")]
        return cache, [(p[k], 0) if isinstance(p[k], dict) else (p, k) for p, k in keys]

    def forward(self, x: Tensor, state: Any = None, **how: Any) -> tuple[Tensor, Any]:
        if how.get("cu_seqlens") is not None:
            raise NotImplementedError("transformers' Mamba takes no packed sequences")
        if state is None or x.shape[1] == 0:
            return self.model(None, x, use_cache=False)[0] if x.shape[1] else x, state
        cache, places = self.begun(x)
        for (held, key), tensor in zip(places, state, strict=True):
            held[key].copy_(tensor)
        mask = None if (n := how.get("lengths")) is None else torch.arange(x.shape[1]) < n[:, None]
        y = self.model(None, x, cache, use_cache=True, attention_mask=mask)[0]
        return y, tuple(held[key].clone() for held, key in places)

    def init_state(self, batch: int) -> Any:
        _, places = self.begun(self.model.embeddings.weight.new_zeros(batch, 1, 8))
        return tuple(torch.zeros_like(held[key]) for held, key in places)

    def state_bytes(self, num_tokens: int) -> int:
        return sum(tensor.nbytes for tensor in self.init_state(1))

    def flops_per_token(self, num_tokens: int) -> float:
        return 2 * sum(weight.numel() for weight in self.parameters())


for law, reason in {**dict.fromkeys(LAWS, "kept"), **broken_laws(Mamba)}.items():
    print(f"{law}: {reason}")
