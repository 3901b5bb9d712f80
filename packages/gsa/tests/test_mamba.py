"""Mamba: its equations, and the memories that it starts with."""

import torch
import torch.nn.functional as F
from mezzo_core.testing import assert_close
from mezzo_gsa.mamba import LONGEST, SHORTEST, MambaConfig


@torch.no_grad()
def test_mamba_is_its_equations_token_by_token():
    torch.manual_seed(0)
    mixer, (E, N) = MambaConfig(state_size=3, dt_rank=2).build(8).double(), (16, 3)
    x = torch.randn(7, 8).double()
    u, z = (x @ mixer.in_proj.weight.T).split(E, -1)
    before = torch.cat([torch.zeros(3, E).double(), u])
    h, outs = torch.zeros(E, N).double(), []
    for t in range(7):
        window = before[t : t + 4].flip(0)  # the newest first
        v = F.silu((window * mixer.conv.weight).sum(0) + mixer.conv.bias)
        low, b, c = (mixer.x_proj.weight @ v).split([2, N, N])
        dt = F.softplus(mixer.dt_proj.weight @ low + mixer.dt_proj.bias)
        h = torch.exp(-dt[:, None] * mixer.log_rates.exp().view(E, N)) * h + torch.outer(dt * v, b)
        outs.append(mixer.out_proj.weight @ ((h @ c + mixer.skip * v) * F.silu(z[t])))
    assert_close("y", mixer(x[None])[0][0], torch.stack(outs), rtol=1e-12)


def test_channels_start_with_time_steps_of_a_thousandth_to_a_tenth_and_rates_of_1_to_n():
    torch.manual_seed(0)
    mixer = MambaConfig().build(256)
    steps = F.softplus(mixer.dt_proj.bias.detach())
    assert SHORTEST * 0.99 < steps.min() < 1.5 * SHORTEST
    assert LONGEST * 1.01 > steps.max() > LONGEST * 0.97
    assert_close("rates", mixer.log_rates.exp()[:16], torch.arange(1.0, 17.0), rtol=1e-6)
    assert torch.equal(mixer.skip, torch.ones(512))


def test_flops_are_the_weights_twice_and_the_state_six_times():
    mixer = MambaConfig(state_size=3).build(24)  # 24 / 16 is a rank of 2
    weights = 24 * 96 + 48 * 4 + 48 * (2 + 3 + 3) + 2 * 48 + 48 * 24
    assert mixer.flops_per_token(7) == 2 * weights + 6 * 48 * 3 + 4 * 48
