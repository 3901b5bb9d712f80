"""Models of flash-linear-attention with our kernels give what they give with its own."""

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.testing import assert_close
from mezzo_gsa import accelerate_fla
from mezzo_gsa.fla import accelerate
from mezzo_gsa.ops import chunk_abc, chunk_gla, chunk_gsa

fla = pytest.importorskip("fla", reason="flash-linear-attention is not installed")
from fla import layers  # noqa: E402
from fla.models.utils import Cache  # noqa: E402

LAYERS = {
    "gsa": lambda: layers.GatedSlotAttention(
        hidden_size=64, num_heads=4, num_kv_heads=2, num_slots=8, layer_idx=0
    ),
    "gla": lambda: layers.GatedLinearAttention(
        hidden_size=64, num_heads=4, num_kv_heads=2, layer_idx=0
    ),
    "hgrn2": lambda: layers.HGRN2Attention(hidden_size=64, expand_ratio=16, layer_idx=1),
    "retnet": lambda: layers.MultiScaleRetention(hidden_size=64, num_heads=2, layer_idx=0),
    "abc": lambda: layers.ABCAttention(hidden_size=64, num_heads=2, num_slots=16, layer_idx=0),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(0)
    layer = LAYERS[request.param]()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return layer


@pytest.fixture
def counted(monkeypatch):
    """Return the calls of our ops, by name."""
    calls = []
    for name, op in {
        "chunk_gsa": chunk_gsa,
        "chunk_gla": chunk_gla,
        "chunk_abc": chunk_abc,
    }.items():

        def called(*args, name=name, op=op, **others):
            calls.append(name)
            return op(*args, **others)

        monkeypatch.setattr(accelerate, name, called)
    return calls


@torch.no_grad()
def decoded(layer, x):
    """The outputs of a prompt, and of two tokens after it, by the library's cache."""
    cache = Cache()
    if layer.layer_idx == 1:
        cache.update(recurrent_state=torch.zeros(1), layer_idx=0, offset=0)
    parts = [
        layer(part, past_key_values=cache, use_cache=True)[0] for part in x.split([7, 1, 1], dim=1)
    ]
    return torch.cat(parts, 1)


@torch.no_grad()
def test_outputs_and_decoding_are_those_of_its_kernels(layer, counted):
    x = torch.randn(2, 9, 64)
    # Its ABC decodes otherwise than it reads a whole text; ours as the text is read.
    is_abc = isinstance(layer, layers.ABCAttention)
    theirs = layer(x)[0] if is_abc else decoded(layer, x)
    assert not counted
    with accelerate_fla():
        ours = decoded(layer, x)
        assert len(counted) == 3
    assert_close("o", ours, theirs, rtol=1e-5)
    assert torch.equal(layer(x)[0] if is_abc else decoded(layer, x), theirs)
    assert len(counted) == 3


def test_padded_rows_are_those_of_its_kernels(layer, counted):
    x = torch.randn(2, 9, 64)
    mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    with torch.no_grad():
        theirs = layer(x, attention_mask=mask)[0]
        with accelerate_fla():
            ours = layer(x, attention_mask=mask)[0]
    assert counted
    assert_close("o", ours[mask.bool()], theirs[mask.bool()], rtol=1e-5)


@pytest.mark.parametrize("name", ["gsa", "gla", "hgrn2", "abc"])
def test_gradients_are_those_of_its_kernels(name, counted):
    """Of layers with a recurrent form: Triton's interpreter runs no other of the library."""
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(2, 9, 64)

    def gradients():
        layer.zero_grad()
        layer(x)[0].square().sum().backward()
        return {name: weight.grad.clone() for name, weight in layer.named_parameters()}

    theirs = gradients()
    with accelerate_fla():
        ours = gradients()
    assert counted
    for weight, gradient in theirs.items():
        assert_close(weight, ours[weight], gradient, rtol=1e-4)


@torch.no_grad()
def test_a_cache_of_its_own_abc_goes_on_with_its_own_kernel(counted):
    layer, x, cache = LAYERS["abc"](), torch.randn(2, 9, 64), Cache()
    layer(x[:, :7], past_key_values=cache, use_cache=True)
    with accelerate_fla():
        layer(x[:, 7:], past_key_values=cache, use_cache=True)
    assert not counted


def test_what_our_kernels_do_not_support_goes_to_its_own(counted):
    from fla.layers import gla, gsa

    q, k, v, s = (torch.randn(1, 5, 2, 16) for _ in range(4))
    gk = -torch.rand(1, 5, 2, 16)

    def reversed_outputs():
        outs = (
            gla.fused_recurrent_gla(q, k, v, gk=gk, reverse=True),
            gsa.fused_recurrent_gsa(q, k, v, s, gk, reverse=True),
        )
        return torch.stack([out for out, _ in outs])

    theirs = reversed_outputs()
    with accelerate_fla():
        assert torch.equal(reversed_outputs(), theirs)
        assert not counted
        gla.fused_recurrent_gla(q, k, v, gk=gk, reverse=False)
        assert counted == ["chunk_gla"]


def test_a_second_call_changes_nothing_and_close_undoes_the_first():
    from fla.layers import gsa
    from fla.modules.activations.ops import swiglu_fwd_kernel

    before, tuned = gsa.chunk_gsa, swiglu_fwd_kernel.configs
    first = accelerate_fla()
    ours = gsa.chunk_gsa
    second = accelerate_fla()
    assert gsa.chunk_gsa is ours is not before
    first.close()
    second.close()
    assert gsa.chunk_gsa is before
    assert swiglu_fwd_kernel.configs is tuned


def test_another_release_is_refused(monkeypatch):
    monkeypatch.setattr(fla, "__version__", "0.7.1")
    with pytest.raises(UserError, match=r"needs flash-linear-attention 0\.6, got 0\.7\.1"):
        accelerate_fla()


def test_short_kernels_are_not_tuned():
    from fla.modules.activations.ops import swiglu_fwd_kernel
    from fla.modules.causal_conv1d.ops import causal_conv1d_fwd_kernel

    before = [swiglu_fwd_kernel.configs, causal_conv1d_fwd_kernel.fn.configs]
    assert min(map(len, before)) > 1
    with accelerate_fla(), accelerate_fla():
        now = [swiglu_fwd_kernel.configs, causal_conv1d_fwd_kernel.fn.configs]
        assert [len(each) for each in now] == [1, 1]
    assert [swiglu_fwd_kernel.configs, causal_conv1d_fwd_kernel.fn.configs] == before
