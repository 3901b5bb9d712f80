"""The recipes: the paper's models and settings. tests/test_commands.py builds them all."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from mezzo_core.nn import AttentionConfig, MLPConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.hgrn2 import HGRN2Config
from mezzo_gsa.hgrn2_stack import HGRN2StackConfig
from mezzo_gsa.recipes import ABLATION, ARCHITECTURES, PAPER_NAMES, RECIPES, SIZES


@cache
def on_meta(name):
    with torch.device("meta"):
        return RECIPES[name]().model.build()


@pytest.mark.parametrize(
    ("setting", "C", "F", "layers", "H", "said"),
    [("1p3b", 2048, 5632, 24, 4, 1.3e9), ("2p7b", 2560, 6912, 32, 5, 2.7e9)],
)
def test_the_papers_models_have_the_papers_sizes(setting, C, F, layers, H, said):
    norms, embeddings = (2 * layers + 1) * C, 2 * 32_000 * C
    attention = layers * (4 * C**2 + 3 * C * F) + embeddings + norms
    gsa = attention + layers * (C * H * 64 + C)
    assert on_meta(f"{setting}_attention").num_parameters() == attention
    assert on_meta(f"{setting}_gsa").num_parameters() == gsa
    # HGRN2: norms, and a row of bounds for each layer.
    assert on_meta(f"{setting}_hgrn2").num_parameters() == attention + 2 * layers * C
    assert gsa == pytest.approx(said, rel=0.06)  # 1.38B and 2.73B: the paper's names are round


@pytest.mark.parametrize("setting", ["1p3b", "2p7b"])
def test_models_of_one_size_have_about_as_many_weights(setting):
    counts = {name: on_meta(f"{setting}_{name}").num_parameters() for name in PAPER_NAMES}
    assert max(counts.values()) < 1.02 * min(counts.values())


@pytest.mark.parametrize("setting", ["340m", "1p3b", "2p7b"])
@pytest.mark.parametrize(
    ("architecture", "size"), [("retnet", 512), ("gla", 256), ("hgrn2", 128), ("gsa", 128)]
)
def test_state_size(setting, architecture, size):
    """Appendix C.1: the numbers in the states of all layers, in multiples of layers and width."""
    model = on_meta(f"{setting}_{architecture}")
    numbers = sum(x.numel() for s in model.init_state(1) for x in s if x.is_floating_point())
    assert numbers == size * len(model.stack.blocks) * model.embed.embedding_dim


def test_state_details():
    """Appendix C.1: the widths behind the sizes of the states."""
    first = {name: on_meta(f"1p3b_{name}").init_state(1)[0] for name in PAPER_NAMES}
    widths = [first[name].h.shape[2] for name in ("retnet", "gla", "hgrn2")]
    assert (*widths, first["gsa"].k.shape[2]) == (256, 256, 128, 64)


def test_gate_params():
    """Section 3.3: a layer of the 1.3B model has 4.125 d^2 weights, with H x m = 256."""
    mixer = on_meta("1p3b_gsa").stack.blocks[0].mixer
    assert (mixer.config.num_heads, mixer.config.num_slots) == (4, 64)
    assert sum(w.numel() for w in mixer.parameters() if w.ndim == 2) == 4.125 * 2048**2


@pytest.mark.parametrize(
    ("setting", "tokens", "batch"), [("340m", 1e10, 2**19), ("1p3b", 1e11, 2**21)]
)
def test_models_train_as_the_paper_says(setting, tokens, batch):
    config = RECIPES[f"{setting}_gsa"]()
    assert config.seq_len * config.batch_size == batch
    assert config.steps * batch == pytest.approx(tokens, rel=1e-3)
    optim = config.optim
    assert (optim.lr, optim.min_lr, optim.weight_decay) == (3e-4, 3e-5, 0.01)
    assert optim.warmup_fraction * tokens == pytest.approx(1e9)
    assert (config.model.vocab_size, config.model.init_std) == (32_000, 0.02)
    assert not config.model.tie_embeddings


def test_the_ablation_of_table_2_changes_one_thing_at_a_time():
    gsa = RECIPES["340m_gsa"]()
    base = gsa.model.mixers[0]
    changes = {
        "gsa_constant_decay": {"gate": "constant"},
        "gsa_between_none": {"between": "none"},
        "gsa_between_swish": {"between": "swish"},
        "gsa_between_relu": {"between": "relu"},
        "gsa_between_relu_squared": {"between": "relu_squared"},
        "gsa_m32": {"num_slots": 32},
        "gsa_m128": {"num_slots": 128},
    }
    assert {*changes, "gsa", "abc"} == set(ABLATION)
    assert base == GSAConfig(num_heads=4, num_slots=64, damping=8.0)
    for architecture, change in changes.items():
        other = RECIPES[f"340m_{architecture}"]()
        mixers = (replace(base, **change),) * 24
        model = replace(gsa.model, mixers=mixers)
        assert other == replace(gsa, name=other.name, model=model)


def test_hybrids_alternate_gsa_and_attention():
    mixers = RECIPES["1p3b_gsa_attention"]().model.mixers
    assert mixers == (GSAConfig(num_heads=4), AttentionConfig(head_dim=64)) * 12


def test_the_layers_of_hgrn2_learn_their_bounds_together():
    stack = RECIPES["2p7b_hgrn2"]().model.stack
    mixer = HGRN2Config(128, norm_eps=128e-5)
    assert stack == HGRN2StackConfig(32, mixer, MLPConfig("swiglu"))


@pytest.mark.parametrize("architecture", SIZES["tiny"][1])
def test_tiny_models_have_about_a_million_weights(architecture):
    assert 0.9e6 < on_meta(f"tiny_{architecture}").num_parameters() < 1.3e6


def test_every_architecture_is_trained_somewhere():
    assert {name for _, names in SIZES.values() for name in names} == set(ARCHITECTURES)
