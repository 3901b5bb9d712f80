"""Models whose states are of all kinds, by name."""

from dataclasses import replace

import torch
from mezzo_core.nn import AttentionConfig, BlocksConfig, MLPConfig
from toys.own_keys import OwnKeysConfig
from toys.retrieval import RetrievalConfig

KINDS = {
    "running mean": {},
    "attention": {"mixers": (AttentionConfig(head_dim=8),) * 2},
    "window": {"mixers": (AttentionConfig(head_dim=8, window_size=3),) * 2},
    "block": {"mixers": (), "mlp": MLPConfig(), "stack": BlocksConfig((OwnKeysConfig(),) * 2)},
    "stack": {"mixers": (), "mlp": MLPConfig(), "stack": RetrievalConfig()},
}


def build(config, kind, seed=0):
    torch.manual_seed(seed)
    return replace(config, init_std=0.4, **KINDS[kind]).build()
