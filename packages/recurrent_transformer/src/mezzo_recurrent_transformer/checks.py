"""Checks of the method that need no training: its limits, its schedule, decoding, its weights.

Each compares counts, or numbers in float64 that can differ by rounding only.
"""

import torch
from mezzo_core.nn import BlocksConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.papers.checks import decode_equals_prefill, equality
from mezzo_core.papers.claims import Check
from mezzo_core.papers.criteria import Judgement, Outcome
from torch import Tensor, nn

from mezzo_recurrent_transformer.block import RecurrentBlockConfig
from mezzo_recurrent_transformer.recipes import RECIPES, SIZES
from mezzo_recurrent_transformer.schedule import tiled_forward
from mezzo_recurrent_transformer.stack import RecurrentStackConfig
from mezzo_recurrent_transformer.theory import random_weights
from mezzo_recurrent_transformer.transformer import TransformerBlockConfig

B, T, C, HEAD_DIM, DEPTH = 2, 45, 24, 8, 3
TOLERANCE = 1e-12


def limit_transformer() -> Judgement:
    """With blocks as long as the sequence the layer is a Transformer's, at equal weights."""
    ours = random_weights(RecurrentBlockConfig(HEAD_DIM, block_size=T), C)
    transformer = TransformerBlockConfig(HEAD_DIM).build(C).double()
    transformer.load_state_dict(ours.state_dict())
    return equality(
        f"a recurrent layer with blocks of T = {T} tokens is a Transformer layer of its weights",
        _run(ours),
        _run(transformer),
        TOLERANCE,
    )


def tiled_schedule() -> Judgement:
    """Algorithm 1 computes the layer; T is no power of two, and ALiBi is on."""
    ours = random_weights(RecurrentBlockConfig(HEAD_DIM), C)
    with torch.no_grad():
        tiled = tiled_forward(ours, _inputs())
    return equality(f"the tiled schedule computes the layer, T = {T}", tiled, _run(ours), TOLERANCE)


def stack_of_layers() -> Judgement:
    """The stack that runs all its layers at once computes what one layer after another does."""
    config = RecurrentStackConfig(DEPTH, RecurrentBlockConfig(HEAD_DIM))
    together = random_weights(config, C)
    one_by_one = BlocksConfig(config.blocks()).build(C).double()
    one_by_one.load_state_dict(together.state_dict())
    return equality(
        f"a stack of {DEPTH} layers at once is the plain stack of its weights, T = {T}",
        _run(together),
        _run(one_by_one),
        TOLERANCE,
    )


def same_weights() -> Judgement:
    """A recurrent model has the weights of its Transformer, name by name."""
    sizes = [size for size, (_, names) in SIZES.items() if "recurrent" in names]
    shapes = {}
    for size in sizes:
        with torch.device("meta"):
            models = [RECIPES[f"{size}_{n}"]().model.build() for n in ("recurrent", "transformer")]
        shapes[size] = [{n: tuple(p.shape) for n, p in m.named_parameters()} for m in models]
    right = all(ours == theirs for ours, theirs in shapes.values())
    return Judgement(
        Outcome.AGREES if right else Outcome.DIFFERS,
        "temporary and persistent pairs share their matrices: no weight more than a Transformer's",
        tuple(f"{size}: {len(ours)} tensors of equal shapes" for size, (ours, _) in shapes.items()),
    )


def _inputs() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(B, T, C, generator=generator, dtype=torch.float64)


@torch.no_grad()
def _run(module: nn.Module) -> Tensor:
    z: Tensor = module(_inputs())[0]
    return z


CHECKS = (
    Check("rt.check.limit_transformer", limit_transformer),
    Check("rt.check.tiled_schedule", tiled_schedule),
    Check("rt.check.stack_of_layers", stack_of_layers),
    decode_equals_prefill(
        "rt.check.decode_equals_prefill",
        LMConfig(
            vocab_size=64, d_model=C, stack=RecurrentStackConfig(2, RecurrentBlockConfig(HEAD_DIM))
        ),
        "two recurrent layers",
    ),
    Check("rt.check.same_weights", same_weights),
)
