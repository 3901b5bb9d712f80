"""The ABC mixer in both readings: the equations, the running log-sum-exp."""

import pytest
import torch
from mezzo_core.nn import init_weights
from mezzo_core.testing import assert_close
from mezzo_gsa.abc import ABCConfig, running_lse
from torch.nn import functional as F

C = 16


def build(config):
    torch.manual_seed(0)
    mixer = config.build(C)
    init_weights(mixer, std=0.5)
    return mixer


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
