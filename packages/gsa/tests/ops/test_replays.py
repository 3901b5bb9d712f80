"""Small calls that repeat the launches of gated slot attention and gated linear attention."""

import pytest
import torch
from mezzo_core.testing.replays import assert_replayed
from mezzo_gsa.ops import chunk_gla, chunk_gsa, chunk_gsa_projected

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, T, H, D, M = 1, 40, 2, 16, 8


def drawn(**last):
    """Return a function that draws inputs (B, T, H, ·); those of gates are log gates."""

    def draw():
        shapes = {name: (B, T, *shape) for name, shape in last.items()}
        found = {name: torch.randn(shape, device=DEVICE) for name, shape in shapes.items()}
        return found | ({"g": -0.1 * found["g"].abs()} if "g" in found else {})

    return draw


@pytest.mark.parametrize("keep_states", [False, True])
def test_gsa(keep_states):
    def op(**given):
        return chunk_gsa(**given, keep_states=keep_states, impl="triton").out

    assert_replayed(op, drawn(q=(H, D), k=(H, D), v=(H, D), g=(H, M)))


def test_gsa_of_a_projection():
    def op(x):
        sizes = {"num_heads": H, "num_kv_heads": H, "num_slots": M}
        return chunk_gsa_projected(x, **sizes, impl="triton").out

    assert_replayed(op, drawn(x=(3 * H * D + H * M,)))


def test_the_backward_of_shared_heads_sums_and_is_not_repeated():
    def op(**given):
        return chunk_gsa(**given, impl="triton").out

    draw = drawn(q=(2 * H, D), k=(H, D), v=(H, D), g=(H, M))
    assert_replayed(op, draw, times=1)


def test_gla():
    def op(**given):
        return chunk_gla(**given, impl="triton").out

    assert_replayed(op, drawn(q=(H, D), k=(H, D), v=(H, D), g=(H, D)))
