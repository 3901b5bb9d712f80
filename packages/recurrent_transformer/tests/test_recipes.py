"""The recipes: the paper's models and settings. tests/test_commands.py builds them all."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.train.build import build_model, refused_later
from mezzo_core.train.distributed import World
from mezzo_core.train.optim import build_optimizer
from mezzo_recurrent_transformer import RecurrentBlock, TransformerBlock
from mezzo_recurrent_transformer.recipes import RECIPES, SIZES

SHAPES = {
    "150m_12": (12, 1024, 16),
    "150m_6": (6, 1408, 22),
    "300m_24": (24, 1024, 16),
    "300m_12": (12, 1408, 22),
    "300m_6": (6, 2048, 32),
}
PAIRED = [size for size, (_, names) in SIZES.items() if "recurrent" in names]


@cache
def on_meta(name):
    with torch.device("meta"):
        return RECIPES[name]().model.build()


def weights(name):
    """Count the weights without those of embedding and head."""
    return sum(p.numel() for p in on_meta(name).stack.parameters())


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_the_layers_that_its_name_says(name):
    kind = TransformerBlock if name.endswith("transformer") else RecurrentBlock
    assert {type(block) for block in on_meta(name).stack.blocks} == {kind}


@pytest.mark.parametrize("size", SHAPES)
def test_the_papers_models_have_the_papers_sizes(size):
    layers, C, heads = SHAPES[size]
    model = on_meta(f"{size}_transformer")
    assert weights(f"{size}_transformer") == layers * (12 * C**2 + 4 * C)
    said = float(size.split("m_")[0]) * 1e6
    assert weights(f"{size}_transformer") == pytest.approx(said, rel=0.06)
    assert len(model.stack.blocks) == layers
    for block in model.stack.blocks:
        assert (block.mixer.num_heads, block.config.head_dim) == (heads, 64)
        assert block.mlp.up.out_features == 4 * C
        assert block.residual_scale == pytest.approx(layers**-0.5)
    assert model.head.weight is not model.embed.weight
    assert model.embed.weight.shape == (32_128, C)


@pytest.mark.parametrize("size", PAIRED)
def test_a_recurrent_model_has_the_weights_of_its_transformer(size):
    ours, theirs = (on_meta(f"{size}_{name}") for name in ("recurrent", "transformer"))
    shapes = [sorted(tuple(p.shape) for p in m.parameters()) for m in (ours, theirs)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("size", ["small", "150m", "300m"])
def test_six_and_twelve_layers_have_about_as_many_weights(size):
    six, twelve = (weights(f"{size}_{layers}_recurrent") for layers in (6, 12))
    assert six == pytest.approx(twelve, rel=0.06)


def width(size):
    return RECIPES[f"{size}_recurrent"]().model.d_model


def kv_cache(size):
    name = f"{size}_recurrent"
    return on_meta(name).state_bytes(RECIPES[name]().seq_len)


def test_width_scaling():
    """Widths are multiples of a head's, so they scale by 1.375 or 1.455 instead of sqrt(2)."""
    assert (width("300m_12"), width("300m_6")) == (1408, 2048)
    for size in ("150m", "300m"):
        assert width(f"{size}_6") / width(f"{size}_12") == pytest.approx(2**0.5, rel=0.05)


def test_kv_cache_30():
    """12 layers hold 2 x 12 x 1408 numbers a token, 6 hold 2 x 6 x 2048."""
    assert 1 - kv_cache("300m_6") / kv_cache("300m_12") == pytest.approx(0.3, rel=0.25)


@pytest.mark.parametrize("size", ["150m", "300m"])
def test_kv_cache_sqrt(size):
    assert kv_cache(f"{size}_12") / kv_cache(f"{size}_6") == pytest.approx(2**0.5, rel=0.05)


@pytest.mark.parametrize("size", PAIRED)
def test_architectures_of_one_size_share_everything_but_their_layers(size):
    _, architectures = SIZES[size]
    first, *others = (RECIPES[f"{size}_{name}"]() for name in architectures)
    for other in others:
        same = {name: getattr(first, name) for name in ("name", "micro_batch_size", "compile")}
        same["model"] = replace(other.model, stack=first.model.stack)
        assert replace(other, **same) == first
        assert other.model != first.model


@pytest.mark.parametrize("name", [f"{size}_{SIZES[size][1][-1]}" for size in SHAPES])
def test_models_train_as_the_paper_says(name):
    config = RECIPES[name]()
    assert config.steps == (12_500 if name.startswith("150m") else 25_000)
    assert (config.seq_len, config.batch_size) == (512, 512)
    optim = config.optim
    assert (optim.lr, optim.min_lr, optim.warmup_fraction) == (3e-3, 3e-4, 0.4)
    assert (optim.betas, optim.weight_decay, optim.clip) == ((0.9, 0.95), 0.0, 1.0)
    assert build_optimizer(torch.nn.Linear(1, 1), optim).defaults["eps"] == 1e-8


def test_variants_change_their_own_option_alone():
    changes = {
        "b8": {"block_size": 8},
        "b32": {"block_size": 32},
        "raw": {"persistent_norm": False},
    }
    plain = RECIPES["small_12_recurrent"]().model.stack
    for name, change in changes.items():
        stack = RECIPES[f"small_12_recurrent_{name}"]().model.stack
        assert stack == replace(plain, block=replace(plain.block, **change))


@pytest.mark.parametrize("name", ["tiny_recurrent", "tiny_recurrent_b8"])
def test_what_generate_will_refuse_is_known_before_the_training(name):
    config = RECIPES[name]()
    found = refused_later(config, config.model.build())
    assert [line.split(": it reads")[0] for line in found] == (
        ["generate will refuse this model: a layer of block_size 8 keeps no state"]
        if name.endswith("b8")
        else []
    )


def test_layers_that_keep_no_state_share_no_sequence():
    world = World(torch.device("cpu"), 0, 2, context=2)
    with pytest.raises(UserError, match="context_parallel passes states on, but a layer of block_"):
        build_model(RECIPES["tiny_recurrent_b8"](), world)
