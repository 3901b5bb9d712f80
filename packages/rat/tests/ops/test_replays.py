"""Small calls that repeat the launches of RAT attention."""

import pytest
import torch
from mezzo_core.testing.replays import assert_replayed
from mezzo_rat.ops import chunk_rat_attention_projected

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("has_bias", [False, True])
def test_rat_attention(has_bias):
    B, T, H, D, L = 2, 20, 1, 32, 16

    def draw():
        bias = {"gate_bias": torch.randn(H, D, device=DEVICE)} if has_bias else {}
        return {"zvgqk": torch.randn(B, T, 5 * H * D, device=DEVICE), **bias}

    def op(**given):
        sizes = {"num_heads": H, "num_groups": H, "chunk_size": L}
        return chunk_rat_attention_projected(**given, **sizes, impl="triton").out

    assert_replayed(op, draw)
