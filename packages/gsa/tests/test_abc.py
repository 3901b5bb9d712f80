"""The ABC mixer in both readings: the contract, the equations, the running log-sum-exp."""

import pytest
import torch
from mezzo_core.data.embedded import embedded_documents
from mezzo_core.nn import LMConfig
from mezzo_core.testing import assert_close
from mezzo_core.testing.mixers import (
    check_causal,
    check_packed,
    check_ragged,
    check_segments,
    check_state_bytes,
    check_step,
)
from mezzo_gsa.abc import ABCConfig, running_lse
from torch import nn
from torch.nn import functional as F

C = 16
CONFIGS = [ABCConfig(2, num_slots=5), ABCConfig(4, num_slots=3, reading="code")]


def build(config, d_model=C, std=0.5):
    torch.manual_seed(0)
    mixer = config.build(d_model)
    for part in mixer.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=std)
    return mixer


@pytest.fixture(params=CONFIGS, ids=str)
def mixer(request):
    return build(request.param)


def test_any_segmentation_and_single_steps_equal_the_whole(mixer):
    check_segments(mixer, d_model=C, num_tokens=14, splits=[3, 0, 5, 1, 5])


def test_a_change_leaves_the_past_bit_equal(mixer):
    check_causal(mixer, d_model=C, num_tokens=14)


def test_packed_sequences_equal_each_alone(mixer):
    check_packed(mixer, C, [5, 0, 1, 4, 9, 0])


def test_prompts_of_different_lengths_decode_as_each_alone(mixer):
    check_ragged(mixer, C, [2, 0, 1, 4, 9], 6)


def test_decoding_in_place_equals_the_whole(mixer):
    check_step(mixer, C, [2, 0, 1, 4, 9], 6)


@pytest.mark.gpu
@pytest.mark.parametrize("reading", ["text", "code"])
def test_kernels_keep_every_law(reading):
    with torch.device("cuda"):
        mixer = build(ABCConfig(2, num_slots=20, reading=reading), 128, std=0.2)
    check_segments(mixer, d_model=128, num_tokens=14, splits=[3, 0, 5, 1, 5])
    check_causal(mixer, d_model=128, num_tokens=14)
    check_packed(mixer, 128, [5, 0, 1, 4, 9, 0])
    check_ragged(mixer, 128, [2, 0, 1, 4, 9], 6)
    check_step(mixer, 128, [2, 0, 1, 4, 9], 6)


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_state_bytes_are_those_of_the_state(mixer, num_tokens):
    check_state_bytes(mixer, num_tokens)


def test_parameters_and_flops():
    with torch.device("meta"):
        text, code = (ABCConfig(reading=reading).build(2048) for reading in ("text", "code"))
    assert sum(p.numel() for p in text.parameters()) == 4.125 * 2048**2 + 2048
    assert text.state_bytes(1) == (2 * 64 * 2048 + 4 * 64) * 4
    assert text.flops_per_token(9) == 2 * 4.125 * 2048**2 + 8 * 64 * 2048
    assert code.flops_per_token(9) == text.flops_per_token(9) + 2 * 64 * 2048


@pytest.mark.parametrize("reading", ["text", "code"])
def test_it_is_equations_3_and_4_or_a_running_average(reading):
    """Every slot as the sum over all tokens so far that the equations unroll to."""
    H, M, D, T = 2, 5, 8, 7
    mixer = build(ABCConfig(H, num_slots=M, reading=reading)).double()
    x = torch.randn(1, T, C, dtype=torch.float64)
    wq, wk, wv, wphi = mixer.in_proj.weight.split([C, C, C, H * M])
    q, k, v = (F.silu(x[0] @ w.T).view(T, H, D) for w in (wq, wk, wv))
    alpha = (x[0] @ wphi.T).exp().view(T, H, M)
    phi = alpha / alpha.cumsum(0)
    outs = []
    for t in range(T):
        share = phi[: t + 1] if reading == "text" else alpha[: t + 1] / alpha[: t + 1].sum(0)
        slots_k = torch.einsum("thm,thd->hmd", share, k[: t + 1])
        slots_v = torch.einsum("thm,thd->hmd", share, v[: t + 1])
        p = torch.einsum("hmd,hd->hm", slots_k, q[t]).softmax(-1)
        outs.append(torch.einsum("hm,hmd->hd", p, slots_v).flatten())
    o = F.silu(torch.stack(outs))
    y = F.rms_norm(o, (C,), eps=1e-5) @ mixer.out_proj.weight.T
    assert_close("y", mixer(x)[0][0], y, rtol=1e-10)


def lse_loop(logits, z0):
    before, after, z = [], [], z0
    for t in range(logits.shape[1]):
        before.append(z)
        z = torch.logaddexp(z, logits[:, t])
        after.append(z)
    return torch.stack(before, 1), torch.stack(after, 1)


@pytest.mark.parametrize("T", [1, 2, 33])
@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_the_running_sum_continues_and_equals_a_loop(T, spread):
    torch.manual_seed(0)
    logits = (spread * torch.randn(2, T, 3, dtype=torch.float64)).requires_grad_()
    z0 = torch.tensor([[float("-inf")] * 3, [0.5, -200.0, 200.0]], dtype=torch.float64)
    weights = torch.randn(2, T, 3, dtype=torch.float64)
    for (before, z), (loop_before, loop_z) in (
        (running_lse(logits, z0), lse_loop(logits, z0)),
        (running_lse(logits), lse_loop(logits, torch.full_like(z0, float("-inf")))),
    ):
        assert_close("before", before.detach(), loop_before.detach(), rtol=1e-12)
        assert_close("z", z, loop_z, rtol=1e-12)
        (d,), (loop_d,) = (torch.autograd.grad(out, logits, weights) for out in (z, loop_z))
        assert_close("dlogits", d, loop_d, rtol=1e-10)


@pytest.mark.parametrize("lengths", [[40], [1, 0, 1, 7, 0, 0, 31], [0, 16, 17], [3, 3, 3]])
def test_the_running_sum_begins_anew_at_each_border(lengths):
    torch.manual_seed(0)
    logits = (30 * torch.randn(1, sum(lengths), 2, 3, dtype=torch.float64)).requires_grad_()
    borders = torch.tensor([0, *lengths]).cumsum(0)
    empty = torch.full((1, 2, 3), float("-inf"), dtype=torch.float64)
    weights = torch.randn_like(logits)
    before, z = running_lse(logits, cu_seqlens=borders)
    pieces = [lse_loop(part, empty) for part in logits.split(lengths, 1) if part.shape[1]]
    loop_before, loop_z = (torch.cat(side, 1) for side in zip(*pieces, strict=True))
    assert_close("before", before.detach(), loop_before.detach(), rtol=1e-12)
    assert_close("z", z, loop_z, rtol=1e-12)
    (d,), (loop_d,) = (torch.autograd.grad(out, logits, weights) for out in (z, loop_z))
    assert_close("dlogits", d, loop_d, rtol=1e-10)


def test_late_tokens_of_an_average_write_their_exact_share():
    """With equal logits token t writes 1/t: the difference of the two sums would lose that."""
    mixer = build(ABCConfig(1, num_slots=2, reading="code"))
    logits = torch.full((1, 5000, 1, 2), 3.0)
    g, s = mixer._strengths(logits, *running_lse(logits))
    assert s is None
    share = -torch.expm1(g.double())[0, :, 0, 0]
    torch.testing.assert_close(share, 1 / torch.arange(1.0, 5001).double(), rtol=5e-6, atol=0)


def test_gradients_reach_every_weight(mixer):
    mixer(torch.randn(2, 9, C))[0].square().sum().backward()
    for name, weight in mixer.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.abs().sum() > 0, name


def test_training_through_padding_gives_finite_gradients(mixer):
    x = torch.randn(2, 6, C, requires_grad=True)
    y, _ = mixer(x, mixer.init_state(2), lengths=torch.tensor([0, 4]))
    y[1, :4].sum().backward()
    assert x.grad.isfinite().all()
    assert not x.grad[0].any()
    assert not x.grad[1, 4:].any()


def test_bfloat16_weights_give_bfloat16_outputs_and_a_float32_state(mixer):
    mixer.bfloat16()
    x = torch.randn(2, 6, C, dtype=torch.bfloat16)
    with torch.no_grad():
        y, state = mixer(x, mixer.init_state(2))
        stepped = mixer.step(x[:, :1], state)
    assert y.dtype == stepped.dtype == torch.bfloat16
    assert {part.dtype for part in state} == {torch.float32}


def test_a_compiled_forward_is_one_graph():
    mixer, x = build(ABCConfig(2, num_slots=5)), torch.randn(2, 9, C)
    forward = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    assert_close("y", forward(x)[0], mixer(x)[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ABCConfig(3), "num_heads must divide d_model = 16, got 3"),
        (ABCConfig(num_slots=0), "num_slots must be 1 or more, got 0"),
        (ABCConfig(reading="paper"), 'reading must be "text" or "code", got \'paper\''),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_built_says_why(config, message):
    with pytest.raises(ValueError, match=message):
        config.build(C)


@pytest.mark.parametrize("reading", ["text", "code"])
def test_a_small_model_learns(reading):
    torch.manual_seed(0)
    model = LMConfig(
        256, 64, (ABCConfig(2, num_slots=16, reading=reading),) * 2, tie_embeddings=False
    ).build()
    text = torch.tensor(list(next(embedded_documents()).encode())[: 4 * 33]).view(4, 33)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(30):
        loss = model.loss(text[:, :-1], text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.55, abs=0.2)  # log 256
    shares = text.flatten().bincount().div(text.numel())
    assert losses[-1] < torch.special.entr(shares).sum() - 0.3, losses
