"""What all mixers of the family share: GSA, ABC, GLA, HGRN2, RetNet and Mamba keep one contract."""

import pytest
import torch
from mezzo_core.data.embedded import embedded_documents
from mezzo_core.nn import LMConfig, generate, init_weights
from mezzo_core.positions import RopeScaling
from mezzo_core.testing import assert_close
from mezzo_core.testing.laws import LAWS, check_step, each_law
from mezzo_gsa.abc import ABCConfig
from mezzo_gsa.gated_abc import GatedABCConfig
from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.hgrn2 import HGRN2Config
from mezzo_gsa.mamba import MambaConfig
from mezzo_gsa.retnet import RetNetConfig
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

C = 16
GLA = {
    "gla": GLAConfig(2),
    "gla, t2r": GLAConfig(4, num_kv_heads=2, expand_k=1.0, feature_map="relu", output_gate=False),
    "gla, narrow keys": GLAConfig(1, expand_k=0.25, expand_v=2.0, gate_rank=2, damping=0.1),
}
RETNET = {
    "retnet": RetNetConfig(2),
    "retnet, t2r": RetNetConfig(
        4, num_kv_heads=2, expand_v=1.0, feature_map="relu", output_gate=False
    ),
    "retnet, supra": RetNetConfig(
        4,
        num_kv_heads=2,
        expand_v=1.0,
        feature_map="relu",
        output_gate=False,
        qk_map=True,
        norm="group",
    ),
    "retnet, narrow keys": RetNetConfig(1, expand_k=0.25, rope_base=100.0),
    "retnet, scaled": RetNetConfig(2, rope_scaling=RopeScaling(8.0, original_context=20)),
}
CONFIGS = {  # on a CPU, C channels wide
    "gsa": GSAConfig(2, num_slots=4),
    "gsa, grouped": GSAConfig(4, num_kv_heads=2, num_slots=5),
    "gsa, constant": GSAConfig(2, num_slots=4, gate="constant"),
    "gsa, spread": GSAConfig(2, num_slots=4, gate_spans=(2.0, 64.0)),
    "gsa, relu": GSAConfig(
        2, num_slots=3, between="relu", feature_map="none", output_norm=False, damping=1.0
    ),
    "gsa, states kept": GSAConfig(1, num_slots=6, between="swish", keep_states=True),
    "gsa, wide": GSAConfig(4, num_kv_heads=2, num_slots=5, head_dim=6),
    "gsa, scaled": GSAConfig(4, num_slots=4, damping=16.0, scale=None),
    "abc": ABCConfig(2, num_slots=5),
    "abc, code": ABCConfig(4, num_slots=3, reading="code"),
    "abc, released": ABCConfig(2, num_slots=5, reading="code", scaled=True),
    "gated abc": GatedABCConfig(2, num_slots=5),
    "hgrn2": HGRN2Config(4),
    "hgrn2, bound 0.5": HGRN2Config(8, lower_bound=0.5),
    "hgrn2, bound 0.75": HGRN2Config(8, lower_bound=0.75),
    **GLA,
    "gla, defaults": GLAConfig(),
    **RETNET,
    "retnet, defaults": RetNetConfig(),
    "mamba": MambaConfig(state_size=4),
    "mamba, no convolution": MambaConfig(1, state_size=3, conv_width=1, dt_rank=2),
}
AS_OTHERS = {
    *("gsa, spread", "gsa, relu", "gsa, states kept", "gsa, wide", "gsa, scaled", "abc, released"),
    *("hgrn2, bound 0.5", "hgrn2, bound 0.75", "gla, narrow keys", "gla, defaults"),
    *("retnet, t2r", "retnet, supra", "retnet, narrow keys", "retnet, defaults"),
}
"""Forms with the same state as another form."""
PLAIN = ["gsa", "abc", "gated abc", "gla", "hgrn2", "retnet"]
ON_GPU = {  # 128 channels wide
    "gsa": GSAConfig(2, num_slots=32),
    "gsa, grouped, constant": GSAConfig(4, num_kv_heads=2, num_slots=20, gate="constant"),
    "gsa, relu squared": GSAConfig(
        2, num_slots=16, between="relu_squared", feature_map="none", output_norm=False
    ),
    "abc": ABCConfig(2, num_slots=20),
    "abc, code": ABCConfig(2, num_slots=20, reading="code", scaled=True),
    "gated abc": GatedABCConfig(2, num_slots=20),
    "hgrn2": HGRN2Config(64),
    "hgrn2, bound 0.75": HGRN2Config(64, lower_bound=0.75),
    **GLA,
    **RETNET,
    "mamba": MambaConfig(),
}


def build(config, d_model=C, std=0.5, device="cpu"):
    torch.manual_seed(0)
    mixer = config.build(d_model)
    init_weights(mixer, std)
    return mixer.to(device)  # drawn on the CPU: the same weights everywhere


@pytest.fixture(params=CONFIGS)
def mixer(request):
    return build(CONFIGS[request.param])


@pytest.mark.parametrize(
    "config", [GSAConfig, GatedABCConfig, GLAConfig, RetNetConfig, HGRN2Config]
)
def test_the_norm_has_the_epsilon_that_is_told_in_steps_too(config):
    mixer = build(config(norm_eps=0.25), 128, std=0.1)
    assert mixer.norm.eps == 0.25
    check_step(mixer, [0, 2], 2)


@pytest.mark.parametrize(("name", "law"), each_law(CONFIGS, AS_OTHERS))
def test_every_law_is_kept(name, law):
    LAWS[law](build(CONFIGS[name]))


@pytest.mark.gpu
@pytest.mark.parametrize("law", [law for law in LAWS if law != "isolated"])
@pytest.mark.parametrize("name", ON_GPU)
def test_kernels_keep_every_law(name, law):
    LAWS[law](build(ON_GPU[name], 128, std=0.1, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_on_a_gpu_an_assistant_changes_no_token(name):
    torch.manual_seed(0)
    config = LMConfig(vocab_size=97, d_model=128, mixers=(ON_GPU[name],) * 2, init_std=0.3)
    model, prompts = config.build().cuda(), [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    plain = generate(model, prompts, max_new_tokens=80)
    for assistant in (config.build().cuda(), model):
        options = {"assistant": assistant, "num_drafted": 5}
        assert generate(model, prompts, max_new_tokens=80, **options) == plain


class Products(TorchDispatchMode):
    """Counts products with a matrix of weights; products of states have one more axis."""

    def __init__(self):
        super().__init__()
        self.columns = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.columns.append(args[-2].shape[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_decoding_step_multiplies_its_input_once(mixer, rows):
    """Before the output come gates of low rank, and SUPRA's map. Forward does the same."""
    low = [
        getattr(mixer, n).in_features for n in ("x_proj", "g_proj", "dt_proj") if hasattr(mixer, n)
    ]
    if getattr(mixer, "qk_map", None) is not None:
        low += [mixer.qk_map.in_features] * 2  # of queries and of keys
    expected = [C, *low, mixer.out_proj.in_features]
    x, state = torch.randn(rows, 1, C), mixer.init_state(rows)
    with torch.no_grad(), Products() as step:
        mixer.step(x, state)
    with torch.no_grad(), Products() as forward:
        mixer(x)
    assert step.columns == forward.columns == expected


def test_shapes_can_be_had_without_numbers(mixer):
    mixer.to("meta")
    y, state = mixer(torch.zeros(2, 7, C, device="meta"), mixer.init_state(2))
    assert y.shape == (2, 7, C)
    assert [part.shape for part in state] == [part.shape for part in mixer.init_state(2)]


@pytest.mark.parametrize(
    "config", [GSAConfig, GatedABCConfig, GLAConfig, HGRN2Config, RetNetConfig]
)
def test_a_norm_has_a_positive_eps(config):
    with pytest.raises(ValueError, match=r"norm_eps must be positive and finite, got -1\.0"):
        config(norm_eps=-1.0).build(128)


def test_bfloat16_weights_give_bfloat16_outputs_and_a_float32_state(mixer):
    mixer.bfloat16()
    x = torch.randn(2, 6, C, dtype=torch.bfloat16)
    with torch.no_grad():
        y, state = mixer(x, mixer.init_state(2))
        stepped = mixer.step(x[:, :1], state)
    assert y.dtype == stepped.dtype == torch.bfloat16
    assert {part.dtype for part in state} - {torch.int64} == {torch.float32}  # but for counters


def test_autocast_steps_equal_the_whole(mixer):
    x = torch.randn(2, 11, C)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole, _ = mixer(x)
        first, state = mixer(x[:, :6], mixer.init_state(2))
        rest = [mixer.step(x[:, t : t + 1], state) for t in range(6, 11)]
    assert whole.dtype == torch.bfloat16
    assert_close("steps", torch.cat([first, *rest], 1), whole, rtol=2e-2)


@pytest.mark.parametrize("name", ["gsa", "abc", "gated abc", "gla", "hgrn2, bound 0.5", "retnet"])
@torch.no_grad()
def test_a_norm_with_a_hook_or_of_another_kind_is_called_in_steps_too(name):
    with_hook, replaced, x = build(CONFIGS[name]), build(CONFIGS[name]), torch.randn(2, 5, C)
    plain = with_hook(x)[0]
    with_hook.norm.register_forward_hook(lambda norm, inputs, y: 2 * y)
    assert_close("with a hook", with_hook(x)[0], 2 * plain, rtol=1e-5)
    replaced.norm = nn.LayerNorm(replaced.norm.weight.shape)
    for mixer in (with_hook, replaced):
        check_step(mixer, [2, 0, 1, 4, 9], 6)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("options", [{"eps": 1.0}, {"eps": 1e-5, "elementwise_affine": False}])
@torch.no_grad()
def test_a_norm_with_another_eps_or_without_a_weight_is_what_is_computed(name, options):
    mixer, x = build(CONFIGS[name]), torch.randn(2, 5, C)
    norm = nn.RMSNorm(mixer.norm.weight.shape, **options)
    mixer.norm = nn.Sequential(norm)  # no plain norm, so it is always called
    expected = mixer(x)[0]
    mixer.norm = norm
    assert_close("y", mixer(x)[0], expected, rtol=1e-5)
    check_step(mixer, [2, 0, 1, 4, 9], 6)


@torch.no_grad()
def test_a_state_of_other_weights_is_brought_to_the_dtype_of_these(mixer):
    x = torch.randn(2, 5, C)
    _, state = mixer(x[:, :4], mixer.init_state(2))
    state = mixer.double().reserve(state, 1)
    expected = mixer(x[:, :5].double())[0][:, 4:]
    assert_close("y", mixer.step(x[:, 4:].double(), state), expected, rtol=1e-5)


@pytest.mark.parametrize("name", [*PLAIN, "mamba"])
def test_autocast_is_near_full_precision(name):
    mixer, x = build(CONFIGS[name]), torch.randn(2, 11, C)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        low, _ = mixer(x)
    assert_close("autocast", low, mixer(x)[0].detach(), rtol=2e-2)


@pytest.mark.parametrize(
    "config",
    [
        GSAConfig(2, num_slots=16),
        ABCConfig(2, num_slots=16),
        ABCConfig(2, num_slots=16, reading="code"),
        GLAConfig(2),
        HGRN2Config(32),
        RetNetConfig(2),
        MambaConfig(),
    ],
    ids=str,
)
def test_a_small_model_learns(config):
    torch.manual_seed(0)
    model = LMConfig(256, 64, (config,) * 2, tie_embeddings=False).build()
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


@pytest.mark.gpu
@pytest.mark.usefixtures("poison_memory")
@pytest.mark.parametrize(
    "config",
    [
        GSAConfig(4, num_slots=64),
        GSAConfig(4, num_slots=64, gate="constant"),
        GLAConfig(4),
        HGRN2Config(128),
        RetNetConfig(8),
        RetNetConfig(16, 4),
        MambaConfig(),
    ],
    ids=str,
)
def test_a_graph_of_the_step_equals_the_forward(config):
    torch.manual_seed(0)
    with torch.device("cuda"):
        mixer = config.build(2048).bfloat16()
    prompt, tokens = torch.randn(1, 38, 2048).to("cuda", torch.bfloat16).split([30, 8], dim=1)
    with torch.inference_mode():
        whole, _ = mixer(torch.cat([prompt, tokens], 1))
        _, start = mixer(prompt, mixer.init_state(1))
        state = mixer.reserve(start, 8)
        x = tokens[:, :1].clone()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            mixer.step(x, state)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = mixer.step(x, state)
        for own, first in zip(state, start, strict=True):
            own.copy_(first)
        outs = []
        for t in range(8):
            x.copy_(tokens[:, t : t + 1])
            graph.replay()
            outs.append(y.clone())
    assert_close("steps", torch.cat(outs, 1), whole[:, 30:], rtol=1e-2)
