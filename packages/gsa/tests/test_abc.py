"""The ABC mixer in both readings, with and without the released scale: equations, sizes, costs."""

import pytest
import torch
from mezzo_core.nn import init_weights
from mezzo_core.positions import rotate
from mezzo_core.testing import assert_close
from mezzo_gsa.abc import ABCConfig
from mezzo_gsa.gated_abc import GatedABCConfig
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


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("reading", ["text", "code"])
def test_it_is_equations_3_and_4_or_a_running_average(reading, scaled):
    """Each slot is the unrolled sum over all tokens so far."""
    H, M, D, T = 2, 5, 8, 7
    mixer = build(ABCConfig(H, num_slots=M, reading=reading, scaled=scaled)).double()
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
        p = torch.einsum("hmd,hd->hm", slots_k, q[t] * (D**-0.5 if scaled else 1)).softmax(-1)
        outs.append(torch.einsum("hm,hmd->hd", p, slots_v).flatten())
    o = F.silu(torch.stack(outs))
    y = F.rms_norm(o, (C,), eps=1e-5) @ mixer.out_proj.weight.T
    assert_close("y", mixer(x)[0][0], y, rtol=1e-10)


@pytest.mark.parametrize("rope_base", [50.0, None])
@torch.no_grad()
def test_the_gated_one_averages_by_bounded_scores_and_rotates_by_its_own_base(rope_base):
    H, M, K, V, T = 2, 5, 8, 4, 7
    config = GatedABCConfig(H, M, 1.0, 0.5, rope_base, score_bounds=(-1.0, 2.0), norm_eps=0.1)
    mixer, x = build(config).double(), torch.randn(1, T, C, dtype=torch.float64)
    q, k, v, z, s = (x[0] @ mixer.in_proj.weight.T).split([H * K, H * K, H * V, H * V, H * M], -1)
    q, k, v, s = (part.view(T, H, -1) for part in (q, k, v, s))
    if rope_base is not None:
        q, k = (rotate(part[None], torch.arange(T), rope_base)[0] for part in (q, k))
    weights, outs = s.clamp(-1, 2).exp(), []
    for t in range(T):
        share = weights[: t + 1] / weights[: t + 1].sum(0)
        slots_k = torch.einsum("thm,thd->hmd", share, k[: t + 1])
        slots_v = torch.einsum("thm,thd->hmd", share, v[: t + 1])
        p = torch.einsum("hmd,hd->hm", slots_k, q[t] * K**-0.5).softmax(-1)
        outs.append(torch.einsum("hm,hmd->hd", p, slots_v))
    o = F.rms_norm(torch.stack(outs), (V,), eps=0.1).flatten(1) * F.silu(z)
    assert_close("y", mixer(x)[0][0], o @ mixer.out_proj.weight.T, rtol=1e-10)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ABCConfig(3), "num_heads must divide d_model = 16, got 3"),
        (ABCConfig(reading="paper"), "reading must be one of .*, got 'paper'"),
        (GatedABCConfig(8), "keys of an even width, got 1 channels a head"),
        (GatedABCConfig(score_bounds=(1, 1)), r"lower and the upper one, got \(1, 1\)"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_built_says_why(config, message):
    with pytest.raises(ValueError, match=message):
        config.build(C)
