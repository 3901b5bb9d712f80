"""The RAT mixer: its start, its sizes and its costs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.testing import assert_close
from mezzo_core.testing.laws import LAWS, check_segments
from mezzo_rat import LinearRNNConfig, RATConfig
from mezzo_rat.mixer import mean_logits
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

C = 16


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        RATConfig(4, head_dim=32),
        RATConfig(5, head_dim=64, num_groups=1, rope="token"),
        RATConfig(3, head_dim=32, num_groups=None, gate_rank=4, rope=None),
        LinearRNNConfig(),
    ],
    ids=str,
)
@pytest.mark.parametrize("law", [law for law in LAWS if law != "isolated"])
def test_kernels_keep_every_law(config, law):
    torch.manual_seed(0)
    mixer = config.build(128)
    for part in mixer.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.2)
    LAWS[law](mixer.cuda())  # drawn on the CPU: the same weights everywhere


@settings(max_examples=settings().max_examples // 6)
@given(
    splits=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    chunk_size=st.integers(1, 8),
)
def test_segments_equal_the_whole_for_any_chunk_size(splits, chunk_size):
    torch.manual_seed(0)
    mixer = RATConfig(chunk_size, head_dim=4).build(8)
    check_segments(mixer, num_tokens=sum(splits), splits=splits)


def test_autocast_changes_the_state_but_not_the_law():
    torch.manual_seed(0)
    mixer, x = RATConfig(4, head_dim=8).build(C), torch.randn(2, 11, C)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole, _ = mixer(x)
        first, state = mixer(x[:, :6], mixer.init_state(2))
        rest = []
        for t in range(6, 11):
            y, state = mixer(x[:, t : t + 1], state)
            rest.append(y)
    assert state.k.dtype == torch.float32
    assert state.k_ends.dtype == torch.bfloat16
    assert_close("segments", torch.cat([first, *rest], 1), whole, rtol=2e-2)
    assert_close("autocast", whole, mixer(x)[0].detach(), rtol=2e-2)


def test_bfloat16_weights_give_bfloat16_outputs_and_float32_running_states():
    mixer = RATConfig(4, head_dim=8).build(C).bfloat16()
    y, state = mixer(torch.randn(2, 6, C, dtype=torch.bfloat16), mixer.init_state(2))
    assert y.dtype == state.v_ends.dtype == torch.bfloat16
    assert state.k.dtype == torch.float32


def test_a_reserved_state_is_contiguous_as_the_kernels_need_it():
    mixer = RATConfig(4, head_dim=8).build(C)
    _, state = mixer(torch.randn(2, 6, C), mixer.init_state(2))
    strided = type(state)(*(x.mT.contiguous().mT if x.ndim > 1 else x for x in state))
    assert not strided.k.is_contiguous()
    for num_tokens in (1, 9):  # without a new slot, and with some
        reserved = mixer.reserve(strided, num_tokens)
        assert all(x.is_contiguous() for x in reserved)


@torch.no_grad()
def test_a_row_whose_slots_are_full_is_refused_before_its_step():
    mixer = RATConfig(4, head_dim=8).build(C)
    _, state = mixer(torch.randn(2, 8, C), mixer.init_state(2), lengths=torch.tensor([7, 8]))
    x = torch.randn(2, 1, C)
    mixer.check_step(x, state._replace(lengths=torch.tensor([7, 7])))
    with pytest.raises(ValueError, match="no slot left"):
        mixer.check_step(x, state)


@torch.no_grad()
def test_gates_of_low_rank_are_products_of_two_matrices():
    low, full = (RATConfig(4, head_dim=8, gate_rank=rank).build(C) for rank in (3, None))
    z, v, g, q, k = low.in_proj.weight.split(low.widths)
    gates = low.z_proj.weight @ z, low.g_proj.weight @ g
    full.in_proj.weight.copy_(torch.cat([gates[0], v, gates[1], q, k]))
    full.out_proj.weight.copy_(low.out_proj.weight)
    full.gate_bias.copy_(low.gate_bias)
    x = torch.randn(2, 9, C)
    assert_close("y", low(x)[0], full(x)[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("chunk_size", "span", "high"), [(16, None, 15.0), (2, None, 1.0), (64, 16, 15.0)]
)
def test_gates_start_with_memories_that_span_the_chunk_or_what_is_told(chunk_size, span, high):
    mixer = RATConfig(chunk_size, head_dim=64, span=span).build(1024)
    u = mixer.gate_bias.detach().exp()
    assert u.min() >= 1 - 1e-5
    assert u.max() <= high + 1e-4
    assert abs(u.mean() - (1 + high) / 2) < 0.05 * (high - 1) + 1e-5


def test_gates_of_chunks_of_one_token_start_at_one_half():
    assert (RATConfig(1, head_dim=4).build(C).gate_bias == 0).all()


@pytest.mark.parametrize("groups", [1, 2])
def test_weights_are_four_squares_and_the_shared_queries_and_keys(groups):
    with torch.device("meta"):
        mixer = RATConfig(num_groups=groups, head_dim=128).build(2048)
    weights = sum(p.numel() for p in mixer.parameters() if p.ndim == 2)
    assert weights == 4 * 2048**2 + 2 * 2048 * groups * 128
    if groups == 2:
        assert weights / (4 * 2048**2) == 1.0625  # against attention: the 1.3B model's layer


def test_the_ablation_has_the_same_number_of_weights():
    with torch.device("meta"):
        shared = RATConfig(64, head_dim=64, num_groups=2).build(1024)
        full = RATConfig(64, head_dim=64, num_groups=None, gate_rank=64).build(1024)
    assert full.num_groups == 16
    sizes = [sum(p.numel() for p in mixer.parameters()) for mixer in (shared, full)]
    assert sizes[0] == sizes[1]


@settings(max_examples=settings().max_examples // 4)
@given(num_tokens=st.integers(1, 200), chunk_size=st.integers(1, 250))
def test_mean_logits_count_earlier_ends_and_the_token_itself(num_tokens, chunk_size):
    counted = sum(t // chunk_size + 1 for t in range(num_tokens)) / num_tokens
    assert mean_logits(num_tokens, chunk_size) == pytest.approx(counted)


def test_mean_logits_are_half_the_chunks_as_the_paper_counts():
    assert mean_logits(0, 16) == 0
    assert mean_logits(4096, 16) == (4096 / 16 + 1) / 2
    assert mean_logits(4096, 1) == (4096 + 1) / 2  # attention
    assert mean_logits(4096, 4096) == 1  # RNN


@pytest.mark.parametrize("num_heads", [None, 6])
@pytest.mark.parametrize(("chunk_size", "num_tokens"), [(64, 64), (8, 64)])
def test_flops_are_those_that_torch_counts_and_the_elementwise_ones(
    chunk_size, num_tokens, num_heads
):
    mixer = RATConfig(chunk_size, head_dim=8, num_heads=num_heads).build(C)
    width = 8 * num_heads if num_heads else C
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        mixer(torch.randn(1, num_tokens, C))
    chunks = num_tokens // chunk_size
    # torch counts the matrix products: all N ends for every token, and not the token's own logit.
    ours = mixer.flops_per_token(num_tokens) - 6 * width - width
    ours += 4 * width * (chunks - mean_logits(num_tokens, chunk_size))
    assert counter.get_total_flops() / num_tokens == pytest.approx(ours)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RATConfig(head_dim=3), "head_dim must divide d_model = 16"),
        (RATConfig(head_dim=4, num_groups=3), "num_groups must divide the 4 heads"),
        (RATConfig(head_dim=1, rope="chunk"), "rope needs an even head_dim"),
    ],
)
def test_impossible_configurations_are_refused_when_they_are_built(config, message):
    with pytest.raises(ValueError, match=message):
        config.build(C)
