"""A Transformer becomes a RAT by `mezzo_gsa.convert`; examples/transformer_to_rat.py tunes one."""

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.nn import AttentionConfig, LMConfig
from mezzo_core.positions import RopeScaling
from mezzo_gsa.convert import convert
from mezzo_rat import RATConfig

D = 8


def transformer(**attention):
    torch.manual_seed(0)
    mixers = (AttentionConfig(D, **attention),) * 2
    config = LMConfig(vocab_size=17, d_model=4 * D, mixers=mixers, init_std=0.2)
    return config, config.build()


@pytest.mark.parametrize(
    "attention",
    [
        {},
        {"num_kv_heads": 2, "rope_base": 300.0},
        {"rope_base": None},
        {"num_heads": 6, "num_kv_heads": 3},
    ],
)
@pytest.mark.parametrize("gate_rank", [None, 3])
@torch.no_grad()
def test_with_chunks_of_a_token_and_closed_gates_it_is_the_transformer(attention, gate_rank):
    config, model = transformer(**attention)

    def make(attention, num_heads):
        base = attention.rope_base
        rope = {"rope": None} if base is None else {"rope_base": base}
        rope |= {"num_heads": attention.num_heads}
        return RATConfig(1, D, num_groups=None, gate_rank=gate_rank, **rope)

    new_config, weights = convert(config, model.state_dict(), make)
    rat = new_config.build()
    rat.load_state_dict(weights)
    tokens = torch.randint(17, (2, 23))
    expected = model(tokens).logits
    assert not torch.allclose(rat(tokens).logits, expected, atol=1e-2)
    for block in rat.stack.blocks:
        block.mixer.gate_bias.fill_(-1e4)
    torch.testing.assert_close(rat(tokens).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_scaled_rope_is_refused_and_not_lost():
    config, model = transformer(rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192))
    for rope in ("chunk", "token"):
        with pytest.raises(UserError, match="RATConfig has plain RoPE, layer 0 a scaled one"):
            convert(config, model.state_dict(), lambda *_, rope=rope: full_rat(rope))
    convert(config, model.state_dict(), lambda *_: full_rat(None))


def full_rat(rope):
    return RATConfig(4, D, num_groups=None, rope=rope)


@pytest.mark.parametrize(
    ("rat", "says"),
    [
        (RATConfig(4, D), "it must have num_groups=None: heads of attention share no queries"),
        (RATConfig(4, 2 * D, num_groups=None), r"it has 2 heads of width 16, got Wq of \(32, 32\)"),
    ],
)
def test_a_rat_whose_matrices_do_not_fit_is_refused_in_one_line(rat, says):
    config, model = transformer(num_kv_heads=1)
    with pytest.raises(UserError, match=f"RATConfig cannot be made of this attention: {says}"):
        convert(config, model.state_dict(), lambda attention, num_heads: rat)
