"""Core's ops and configurations, each argument replaced: one clear line, or a right result."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mezzo_core.data import DataConfig, MixtureConfig
from mezzo_core.nn import AttentionConfig, LMConfig, MLPConfig
from mezzo_core.ops.attention import attention
from mezzo_core.ops.decode_attention import append_token_, decode_attention
from mezzo_core.ops.decode_linear import decode_linear
from mezzo_core.ops.linear_cross_entropy import linear_cross_entropy
from mezzo_core.ops.scan import linear_scan
from mezzo_core.positions import (
    alibi_slopes,
    apply_rope,
    rope_angles,
    rope_steps,
    sequence_ids,
    sequence_positions,
)
from mezzo_core.testing.arguments import (
    Call,
    check_arguments,
    check_fields,
    check_module_arguments,
    find_fault,
    replacements,
)

B, T, H, D = 2, 5, 2, 4


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def attend(**more):
    return {"q": draw(B, T, 2 * H, D), "k": draw(B, T, H, D), "v": draw(B, T, H, D), **more}


def cache(**more):
    lengths = torch.tensor([3, 1])
    return {"q": draw(B, 2 * H, D), "k": draw(B, T, H, D), "v": draw(B, T, H, D)} | {
        "lengths": lengths, **more
    }  # fmt: skip


def appended():
    return {
        "q": draw(B, 2 * H, D), "k": draw(B, H, D), "v": draw(B, H, D),
        "k_cache": draw(B, T, H, D), "v_cache": draw(B, T, H, D),
        "lengths": torch.tensor([3, 1]), "rope_base": 10_000.0, "rope_scaling": None,
        "impl": "auto",
    }  # fmt: skip


def head():
    targets = torch.tensor([[1, -100, 0, 5, 2]]).expand(B, T)
    return {"x": draw(B, T, D), "weight": draw(6, D), "targets": targets, "impl": "auto"}


def by_reference(**arguments):
    return attention(**{**arguments, "impl": "reference"})


def ids(cu_seqlens):
    return sequence_ids(T, cu_seqlens)


def positions(start):
    return sequence_positions(T, start=start)


START = frozenset({"start"})
CALLS = [
    Call(attention, lambda: attend(scale=0.5, impl="auto"), frozenset({"scale"}), by_reference),
    Call(attention, lambda: attend(window_size=3), frozenset({"window_size"}), by_reference),
    Call(
        attention,
        lambda: attend(alibi_slopes=alibi_slopes(2 * H)),
        frozenset({"alibi_slopes"}),
        by_reference,
    ),
    Call(
        attention,
        lambda: {
            "q": draw(1, T, H, D), "k": draw(1, T, H, D), "v": draw(1, T, H, D),
            "cu_seqlens": torch.tensor([0, 2, 2, T]),
        },
        frozenset({"cu_seqlens"}),
        by_reference,
    ),
    Call(
        attention,
        lambda: attend(q_positions=torch.arange(T)[None], k_positions=torch.arange(T)[None]),
        definition=by_reference,
    ),
    Call(decode_attention, lambda: cache(scale=0.5, impl="auto"), frozenset({"scale"})),
    Call(
        decode_attention,
        lambda: cache(alibi_slopes=alibi_slopes(2 * H)),
        frozenset({"alibi_slopes"}),
    ),
    Call(append_token_, appended, frozenset({"rope_base", "rope_scaling"})),
    Call(
        decode_linear,
        lambda: {"x": draw(B, D), "weight": draw(3, D), "bias": draw(3), "norm_weight": draw(D)}
        | {"norm_eps": 1e-6, "impl": "auto"},
        frozenset({"bias", "norm_weight"}),
        of_any_rank=frozenset({"x"}),
    ),
    Call(linear_cross_entropy, head),
    Call(
        linear_scan,
        lambda: {"a": draw(B, T, D), "x": draw(B, T, D), "initial_state": draw(B, D)}
        | {"chunk_size": 2, "impl": "auto"},
        frozenset({"initial_state", "chunk_size"}),
    ),
    Call(
        linear_scan,
        lambda: {n: draw(1, T, D) for n in ("a", "x")} | {"cu_seqlens": torch.tensor([0, 2, T])},
        frozenset({"cu_seqlens"}),
    ),
    Call(
        rope_angles,
        lambda: {"positions": torch.arange(T)[None], "dim": 4, "base": 10_000.0, "scaling": None},
        frozenset({"scaling"}),
        of_any_rank=frozenset({"positions"}),
    ),
    Call(
        apply_rope,
        lambda: {"x": draw(B, T, H, D), "cos": draw(T, D // 2), "sin": draw(T, D // 2)},
    ),
    Call(alibi_slopes, lambda: {"num_heads": 3, "formula": "press"}),
    Call(rope_steps, lambda: {"dim": 4, "base": 10_000.0}),
    Call(ids, lambda: {"cu_seqlens": torch.tensor([0, 2, T])}),
    Call(positions, lambda: {"start": torch.tensor([0, 7])}, START),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_each_argument_replaced_is_named_or_right(call):
    check_arguments(call)


@given(data=st.data())
def test_several_arguments_replaced_are_named_or_right(data):
    call = data.draw(st.sampled_from(CALLS))
    choices = {name: replacements(value) for name, value in call.arguments().items()}
    names = data.draw(st.sets(st.sampled_from([n for n in choices if choices[n]]), min_size=1))
    replaced = {name: data.draw(st.sampled_from(choices[name])) for name in sorted(names)}
    assert find_fault(call, replaced) is None


def test_each_argument_of_a_mixer_replaced_is_named_or_right():
    check_module_arguments(AttentionConfig(head_dim=4, window_size=3).build(8))


def logits(config: LMConfig) -> torch.Tensor:
    return config.build()(torch.zeros(2, 3, dtype=torch.int64)).logits


LM = LMConfig(vocab_size=9, d_model=8, mixers=(AttentionConfig(head_dim=4),))


def test_each_field_replaced_is_named_or_right():
    check_fields(LM, logits)
    check_fields(MLPConfig(), lambda mlp: mlp.build(8)(draw(2, 8)))
    for mixer in (
        AttentionConfig(head_dim=4),
        AttentionConfig(head_dim=4, rope_base=None, alibi="press"),
    ):
        check_fields(mixer, lambda config: config.build(8)(draw(2, 3, 8))[0])


def test_each_field_of_a_text_replaced_is_named_or_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 9)
    config = DataConfig(source=str(tmp_path / "a.jsonl"))
    for data in (config, MixtureConfig((config, config), (1.0, 1.0))):
        check_fields(data, lambda data: data.build(4, None).train_batch(0, 1).tokens)
