"""The recipes: the paper's models and settings. tests/test_commands.py builds them all."""

from dataclasses import replace

import pytest
import torch
from mezzo_core.nn.attention import AttentionConfig
from mezzo_rat import LinearRNNConfig, RATConfig
from mezzo_rat.recipes import RECIPES, SIX


def parameters(name):
    with torch.device("meta"):
        return RECIPES[name]().model.build().num_parameters()


@pytest.mark.parametrize(
    ("setting", "C", "layers", "D", "vocab", "said"),
    [("200m", 1024, 12, 64, 50_257, 202e6), ("1p3b", 2048, 24, 128, 32_000, 1.27e9)],
)
def test_the_papers_models_have_the_papers_sizes(setting, C, layers, D, vocab, said):
    norms = (2 * layers + 1) * C
    attention = layers * 12 * C**2 + vocab * C + norms
    assert parameters(f"{setting}_attention") == attention
    assert parameters(f"{setting}_rnn") == attention + layers * C
    assert parameters(f"{setting}_rat_l16") == attention + layers * (4 * C * D + C)
    assert attention == pytest.approx(said, rel=0.01)


def test_the_ablation_spends_the_same_budget_on_queries_and_keys():
    assert parameters("200m_rat_l64_full_qk") == parameters("200m_rat_l64")


@pytest.mark.parametrize("architecture", SIX)
def test_tiny_models_have_about_a_million_weights(architecture):
    assert 0.8e6 < parameters(f"tiny_{architecture}") < 1.2e6


@pytest.mark.parametrize(
    ("setting", "seq_len"), [("200m", 8192), ("200m_16k", 16_384), ("200m_32k", 32_768)]
)
def test_200m_models_train_as_the_paper_says(setting, seq_len):
    config = RECIPES[f"{setting}_rat_l64"]()
    assert (config.seq_len, config.batch_size * seq_len) == (seq_len, 2**20)
    assert config.steps * 2**20 == pytest.approx(15e9, rel=1e-4)
    optim = config.optim
    assert (optim.lr, optim.min_lr, optim.warmup_fraction) == (6e-4, 1e-6, 0.1)
    assert (optim.betas, optim.weight_decay, optim.clip) == ((0.9, 0.98), 0.1, 1.0)


@pytest.mark.parametrize(
    ("setting", "seq_len", "rope_base"), [("1p3b", 4096, 10_000.0), ("1p3b_16k", 16_384, 500_000.0)]
)
def test_1p3b_models_train_as_the_paper_says(setting, seq_len, rope_base):
    config = RECIPES[f"{setting}_rat_swa"]()
    assert (config.seq_len, config.batch_size * seq_len) == (seq_len, 2**21)
    assert config.steps * 2**21 == pytest.approx(100e9, rel=1e-4)
    optim = config.optim
    assert (optim.lr, optim.min_lr, optim.warmup_fraction) == (8e-4, 1e-6, 0.05)
    assert (optim.betas, optim.weight_decay, optim.clip) == ((0.9, 0.95), 0.1, 1.0)
    assert {mixer.rope_base for mixer in config.model.mixers} == {rope_base}
    assert (config.model.norm_eps, config.model.init_std) == (1e-6, 0.02)


def test_hybrids_alternate_global_layers_and_windows():
    window = AttentionConfig(head_dim=128, window_size=1024)
    whole = {
        "attention_swa": AttentionConfig(head_dim=128),
        "rat_swa": RATConfig(16, head_dim=128),
    }
    for architecture, mixer in whole.items():
        assert RECIPES[f"1p3b_{architecture}"]().model.mixers == (mixer, window) * 12


def test_nope_drops_positions_in_the_global_layers_only():
    for architecture, change in (
        ("rat_swa", {"rope": None}),
        ("attention_swa", {"rope_base": None}),
    ):
        plain = RECIPES[f"1p3b_{architecture}"]().model.mixers
        nope = RECIPES[f"1p3b_{architecture}_nope"]().model.mixers
        assert nope[1::2] == plain[1::2]
        assert nope[0::2] == tuple(replace(mixer, **change) for mixer in plain[0::2])


@pytest.mark.parametrize("setting", ["tiny", "small", "mid"])
def test_windows_of_smaller_settings_keep_the_papers_ratio(setting):
    config = RECIPES[f"{setting}_rat_swa"]()
    assert config.model.mixers[1].window_size * 4 == config.seq_len


def test_the_rnn_starts_with_memories_of_the_training_context():
    assert RECIPES["200m_16k_rnn"]().model.mixers[0] == LinearRNNConfig(span=16_384)


def test_reversed_models_have_the_number_of_chunks_of_their_names():
    for setting, name in (("200m", "c64"), ("200m_32k", "c16")):
        config = RECIPES[f"{setting}_reversed_{name}"]()
        mixer = config.model.mixers[0]
        assert config.seq_len // mixer.chunk_size == mixer.span == int(name[1:])
    assert RECIPES["200m_reversed_c64"]().model.mixers[0].chunk_size == 128  # appendix C.1


def test_six_architectures_of_a_setting_share_everything_but_their_mixers():
    first = RECIPES["tiny_rnn"]()
    for architecture in SIX[1:]:
        other = RECIPES[f"tiny_{architecture}"]()
        same = replace(
            other, name=first.name, model=replace(other.model, mixers=first.model.mixers)
        )
        assert same == first
        assert other.model != first.model
