"""Small calls replay the launches of grouped cross-attention."""

import pytest
import torch
from mezzo_core.testing.replays import assert_replayed
from mezzo_drt.ops import grouped_cross_attention

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_grouped_cross_attention():
    """The backward is not replayed, as it sorts the readers of chunks."""
    B, N, M, S, L, R, H, D = 1, 3, 16, 4, 16, 2, 2, 16

    def draw():
        shapes = {"q": (B, N, M, H, D), "k": (B, S, L, H, D), "v": (B, S, L, H, D)}
        given = {name: torch.randn(shape, device=DEVICE) for name, shape in shapes.items()}
        chosen = torch.rand(B, N, S, device=DEVICE).topk(R)
        return given | {"indices": chosen.indices, "weights": chosen.values}

    assert_replayed(lambda **given: grouped_cross_attention(**given, impl="triton"), draw, times=1)
