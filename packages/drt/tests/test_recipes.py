"""The recipes: the paper's models and settings. tests/test_commands.py builds them all."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from mezzo_core.nn.attention import Attention
from mezzo_core.nn.mlp import SwiGLU
from mezzo_drt import DRTConfig
from mezzo_drt.recipes import ARCHITECTURES, PAPER_NAMES, RECIPES, SIZES, attention_field
from torch import nn

PAPER = [size for size in SIZES if size.startswith(("128m", "350m"))]
DRTS = [name for name in ARCHITECTURES if not name.startswith("base")]


@cache
def on_meta(name):
    with torch.device("meta"):
        return RECIPES[name]().model.build()


def weights(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_the_stack_that_its_name_says(name):
    is_drt = isinstance(RECIPES[name]().model.stack, DRTConfig)
    assert is_drt == any(name.endswith(f"_{architecture}") for architecture in DRTS)


def test_the_models_of_128m_have_the_papers_size():
    """128M without, 146M with encoder and cross-attention; the projections of landmarks add 1M."""
    C, F, vocab = 768, 2048, 50_257
    layer = 4 * C**2 + 3 * C * F + 2 * C
    plain = on_meta("128m_pg19_base")
    assert weights(plain) == vocab * C + 12 * layer + C == 123_551_232
    assert weights(on_meta("128m_pg19_base_wide")) == weights(plain)
    assert weights(on_meta("128m_pg19_base_deep")) == weights(plain) + 2 * layer
    encoder = 2 * layer + 2 * C**2 + 2 * C  # keys, values, and the norms before and after
    reading = 6 * (2 * C**2 + C)
    drt = on_meta("128m_pg19_drt1")
    landmarks = C + 2 * C**2
    assert weights(drt) == weights(plain) + encoder + reading + landmarks
    assert weights(drt) - 2 * C**2 == pytest.approx(146e6, rel=1e-3)
    assert weights(on_meta("128m_pg19_drt2")) == weights(drt) + C**2


def test_the_other_sizes_are_about_what_they_are_called():
    assert weights(on_meta("350m_pg19_base")) == pytest.approx(350e6, rel=0.05)
    assert weights(on_meta("small_base").stack) == pytest.approx(15e6, rel=0.02)
    assert weights(on_meta("tiny_drt1")) < 4e5


@pytest.mark.parametrize("size", PAPER)
def test_models_train_as_the_paper_says(size):
    for architecture in ARCHITECTURES:
        config = RECIPES[f"{size}_{architecture}"]()
        assert config.seq_len == 16_384
        assert config.batch_size * config.seq_len == 2**19
        assert config.steps == 60_000
        optim = config.optim
        assert (optim.lr, optim.min_lr, optim.warmup_fraction) == (2e-3, 4e-4, 0.02)
        assert (optim.betas, optim.weight_decay, optim.clip) == ((0.9, 0.95), 1e-3, 1.0)
        model = on_meta(config.name)
        assert model.head.weight is model.embed.weight
        norms = {n: m.eps for n, m in model.named_modules() if isinstance(m, nn.RMSNorm)}
        inner = {n for n in norms if ".encoder." in n and not n.endswith(".input_norm")}
        assert all(eps == (1e-6 if name in inner else 1e-5) for name, eps in norms.items())
        for module in model.stack.modules():
            if isinstance(module, Attention):
                assert module.config.alibi == "olmo"
                assert module.config.rope_base is None
        assert any(isinstance(module, SwiGLU) for module in model.modules())


def test_baseline_field_768():
    """Section 4.1.2: 12 x 768 tokens are 12 x 512 + 6 x 512."""
    assert windows("128m_pg19_base") == [512] * 12
    assert windows("128m_pg19_base_wide") == [768] * 12
    assert attention_field(SIZES["128m_pg19"]().drt) == 12 * 768
    assert windows("tiny_base_wide") == [64] * 4


def test_baseline_14_layers():
    """Section 4.1.2: 14 x 658 tokens are about as many; so are its weights."""
    deep, drt = "128m_pg19_base_deep", "128m_pg19_drt1"
    assert windows(deep) == [658] * 14
    assert sum(windows(deep)) == pytest.approx(attention_field(SIZES["128m_pg19"]().drt), rel=1e-3)
    assert weights(on_meta(deep)) == pytest.approx(weights(on_meta(drt)), rel=0.08)


def windows(name):
    return [block.mixer.config.window_size for block in on_meta(name).stack.blocks]


@pytest.mark.parametrize("size", SIZES)
def test_architectures_of_one_size_share_everything_but_their_layers(size):
    first, *others = (RECIPES[f"{size}_{name}"]() for name in ARCHITECTURES)
    for other in others:
        assert replace(other, name=first.name, model=first.model) == first
        assert other.model.norm_eps == first.model.norm_eps
        assert other.model != first.model


def test_variants_change_their_own_option_alone():
    changes = {
        "drt2": {"num_groups": 2},
        "no_gumbel": {"gumbel_noise": False},
        "random": {"retriever": "random"},
        "fixed": {"retriever": "fixed"},
    }
    plain = RECIPES["small_drt1"]().model.stack
    for name, change in changes.items():
        assert RECIPES[f"small_{name}"]().model.stack == replace(plain, **change)


def test_each_architecture_has_the_papers_name():
    assert PAPER_NAMES.keys() == ARCHITECTURES.keys()
