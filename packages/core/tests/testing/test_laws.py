"""The checks pass on a correct mixer, and each of them fails on the mistake that it is for."""

from typing import NamedTuple

import pytest
import torch
from mezzo_core.nn.contract import AbstractBlock, AbstractMixer
from mezzo_core.testing.laws import LAWS, broken_laws, check_segments
from torch import Tensor, nn
from toys.own_keys import OwnKeysBlock, OwnKeysConfig

C = 4


class SumState(NamedTuple):
    h: Tensor
    lengths: Tensor
    room: Tensor  # that nobody writes or reads


class ReadTwice(torch.autograd.Function):
    """The identity, whose backward reads what was saved once too often."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx + 0 * ctx.saved_tensors[0] + 0 * ctx.saved_tensors[0]


class RunningMean(AbstractMixer):
    """y[t] = W mean(x[0..t]): the smallest mixer with a state, and with one mistake on demand."""

    d_model = C
    state_type = SumState

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj, self.score = nn.Linear(C, C), nn.Parameter(torch.zeros(C))
        self.mistake = mistake
        if mistake == "a tensor unsaved":
            self.scale = torch.ones(1)
        if mistake == "a buffer unsaved":
            self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x, state=None, *, cu_seqlens=None, lengths=None):
        if cu_seqlens is not None and self.mistake != "packing ignored":
            sizes = cu_seqlens.diff().tolist()
            if self.mistake == "int64 ignored" and cu_seqlens.dtype == torch.int64:
                sizes = [x.shape[1]]
            if self.mistake == "sequences times zero":
                x = x + 0 * x.sum(1, keepdim=True)
            if self.mistake == "gradients times zero":
                x = x + (0 * x * x.sum(1, keepdim=True)).nan_to_num()
            if self.mistake == "gradients added":
                x = x + (0 * x.sum(1, keepdim=True)).nan_to_num()
            return torch.cat([self(part)[0] for part in x.split(sizes, 1)], 1), None
        B, T, _ = x.shape
        given = state if state is not None else self.init_state(B)
        if self.mistake == "state forgotten":
            given = self.init_state(B)
        if self.mistake == "state detached":
            given = given._replace(h=given.h.detach())
        if self.mistake == "inference forgotten" and given.h.is_inference():
            given = self.init_state(B)
        if self.mistake == "state returned in training" and state is None:
            state = given
        real = torch.full((B,), T) if lengths is None else lengths
        if self.mistake == "lengths ignored":
            real = torch.full((B,), T)
        padding = (torch.arange(T) >= real[:, None]).unsqueeze(-1)
        if self.mistake == "padding masked late":
            x = x * self.score.exp()
        x = x * ~padding if self.mistake == "padding times zero" else x.masked_fill(padding, 0)
        score = self.score.sigmoid()
        x = x * (score.detach() if self.mistake == "score detached" else score)
        h = given.h[:, None] + x.cumsum(1)
        if self.mistake == "past times zero":
            h = given.h[:, None] + torch.ones(T, T).tril() @ x
        if self.mistake == "rows times zero":
            h = h + 0 * x.sum(0)
        if self.mistake == "large rows times zero":
            h = h + 0 * (10 * x.nan_to_num(0, 0, 0)).sum(0)
        if self.mistake == "past times zero with a state" and state is not None:
            h = given.h[:, None] + torch.ones(T, T).tril() @ x
        if self.mistake == "states times zero":
            h = h + 0 * given.h.sum(0)
        if self.mistake == "forgets after 64 tokens" and T > 64:
            h = torch.cat([h[:, :64], h[:, 64:] - h[:, 63:64]], 1)
        if self.mistake == "future leaks after 64 tokens":
            h = torch.cat([h[:, :64], h[:, 64:] + 1e-7 * h[:, -1:]], 1)
        if self.mistake == "NaN swallowed":
            h = h.nan_to_num()
        if self.mistake == "future leaks":
            h = h + 1e-6 * x.mean(1, keepdim=True)
        count = given.lengths[:, None] + torch.arange(1, T + 1)
        y = self.proj(h / count.unsqueeze(-1))
        if self.mistake == "x ignored":
            y = y * 0
        if self.mistake == "saved tensors read twice":
            y = ReadTwice.apply(y)
        if self.mistake == "words of torch":
            y = nn.functional.scaled_dot_product_attention(y[:, None], h[:, None], h[:, None])[:, 0]
        last = h[:, -1].clone() if T else given.h
        if self.mistake == "a view of all tokens" and T:
            last = h[:, -1]
        if self.mistake == "no tokens forget" and not T:
            last = last * 0
        if self.mistake == "state overwritten" and state is not None:
            given.h.copy_(last)
        if self.mistake == "lengths kept" and lengths is not None and not given.lengths.any():
            return y, SumState(last, lengths, given.room)
        if self.mistake == "state grows" and state is not None:
            last = torch.cat([last, last])
        return y, None if state is None else SumState(last, given.lengths + real, given.room)

    def step(self, x, state):
        if self.mistake == "step forgets":
            return self(x, state)[0]
        if self.mistake == "step moves":
            y, after = self(x, state)
            state.h.set_(after.h.clone())
            state.lengths.add_(1)
            return y
        return super().step(x, state)

    def reserve(self, state, num_tokens):
        return state if self.mistake == "reserve shares" else super().reserve(state, num_tokens)

    def copy_rows(self, state, rows):
        if self.mistake == "fork shares" and rows is None:
            return state
        if self.mistake == "rows sorted" and rows is not None:
            rows = rows.sort().values
        if self.mistake == "copies forget":
            return super().copy_rows(self.init_state(len(state.h)), rows)
        return super().copy_rows(state, rows)

    def overwritten(self):
        found = super().overwritten()
        return (False, *found[1:]) if self.mistake == "the sum is said to stay" else found

    def reset(self, state, rows):
        if self.mistake == "reset forgets a counter":
            return super().reset(state, rows)._replace(lengths=state.lengths)
        return super().reset(state, [0, 1, 2] if self.mistake == "all rows reset" else rows)

    def init_state(self, batch):
        lengths, room = torch.zeros(batch, dtype=torch.int64), torch.full((batch, 1), torch.nan)
        dtype = self.proj.weight.dtype
        if self.mistake == "float32 state" and dtype == torch.float64:
            dtype = torch.float32
        return SumState(torch.zeros(batch, C, dtype=dtype), lengths, room)

    def state_bytes(self, num_tokens):
        return 4 * (C + 1) * (2 if self.mistake == "bytes miscounted" else 1)

    def flops_per_token(self, num_tokens):
        wrong = {"no FLOPs": 0.0, "five times the FLOPs": 5.0}
        return wrong.get(self.mistake, 1.0) * 2 * C * C


@pytest.mark.parametrize("name", LAWS)
def test_a_correct_mixer_passes(name):
    LAWS[name](RunningMean())


@pytest.mark.parametrize(
    ("name", "mistake", "message"),
    [
        ("segments", "state forgotten", "segments"),
        ("segments", "state overwritten", "overwrote field 0"),
        ("segments", "state returned in training", "must return None"),
        ("causal", "future leaks", "reached the past"),
        ("causal", "x ignored", "reached nothing"),
        ("training", "inference forgotten", "dx after inference mode"),
        ("training", "saved tensors read twice", "activations cannot be computed again"),
        ("training", "words of torch", "derivative for aten::_scaled_dot_product"),
        ("isolated", "past times zero", "nan in token 1 reached the past"),
        ("isolated", "rows times zero", "nan in token 0 reached another row"),
        ("isolated", "large rows times zero", r"1e\+38 in token 0 reached another row"),
        ("isolated", "past times zero with a state", "nan in token 6 reached the past by"),
        ("isolated", "states times zero", "nan in token 6 reached another row by"),
        ("isolated", "gradients times zero", "in a packed sequence reached another one's grad"),
        ("isolated", "gradients added", "sequence's gradient reached another one's grad"),
        ("isolated", "NaN swallowed", "nan in token 0 does not show there"),
        ("isolated", "sequences times zero", "nan in a packed sequence reached another one"),
        ("isolated", "padding times zero", "nan in padding reached the next forward"),
        ("isolated", "lengths ignored", "in padding reached the next forward"),
        ("packed", "packing ignored", "packed"),
        ("packed", "int64 ignored", "packed"),
        ("ragged", "lengths ignored", "row"),
        ("ragged", "state forgotten", "row"),
        ("step", "step forgets", "row"),
        ("step", "lengths kept", "row"),
        ("step", "step moves", "moved"),
        ("step", "reserve shares", "that reserve was given"),
        ("step", "state overwritten", "overwrote field 0"),
        ("state bytes", "bytes miscounted", "state_bytes"),
        ("state bytes", "a view of all tokens", "bytes are views that keep 140 in memory"),
        ("plain state", "a tensor unsaved", "never saved: .'scale'"),
        ("plain state", "a buffer unsaved", "never saved: .'scale'"),
        ("handled", "fork shares", "a fork of a fork goes on otherwise"),
        ("handled", "rows sorted", r"rows \[1, 0, 1, 2, 1\]"),
        ("handled", "reset forgets a counter", "the row that starts over"),
        ("handled", "all rows reset", "the other rows"),
        ("handled", "x ignored", "other tokens gave the same outputs"),
        ("saved", "copies forget", "a loaded state goes on otherwise"),
        ("programs", "the sum is said to stay", "row . after .*rollback"),
        ("programs", "lengths ignored", "row . after "),
        ("gradients", "score detached", "the gradients say"),
        ("gradients", "state detached", "dx by two segments"),
        ("padding's gradients", "padding masked late", "nan in padding reached the gradient of sc"),
        ("empty", "no tokens forget", "no tokens changed the state"),
        ("precision", "float32 state", "float64, step by step"),
        ("long", "forgets after 64 tokens", "61, 0 and 16 tokens"),
        ("isolated", "future leaks after 64 tokens", "nan in token 68 reached the past"),
        ("flops", "no FLOPs", r"flops_per_token\(19\) = 0"),
        ("flops", "five times the FLOPs", r"flops_per_token\(19\) = 160"),
    ],
)
def test_a_mistake_is_caught(name, mistake, message):
    with pytest.raises(AssertionError, match=message):
        LAWS[name](RunningMean(mistake))


def keys_shared(module, state, rows):
    copied = AbstractBlock.copy_rows(module, state, rows)
    return copied._replace(k=state.k) if rows is None else copied


@pytest.mark.parametrize(
    ("name", "method", "mistake", "message"),
    [
        ("handled", "copy_rows", keys_shared, "a step wrote into a fork"),
        ("step", "check_step", AbstractBlock.check_step, "a step beyond the room"),
    ],
)
def test_a_mistake_in_a_state_that_grows_is_caught(monkeypatch, name, method, mistake, message):
    monkeypatch.setattr(OwnKeysBlock, method, mistake)
    block = OwnKeysConfig().build(C)
    block.init_own_weights()
    with pytest.raises(AssertionError, match=message):
        LAWS[name](block)


def test_a_state_that_grows_is_refused_by_the_default_step():
    mixer = RunningMean("state grows")
    with torch.no_grad(), pytest.raises(ValueError, match=r"RunningMean must .* grows, from \(2"):
        mixer.step(torch.randn(2, 1, C), mixer.init_state(2))


def test_splits_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="add up to 9"):
        check_segments(RunningMean(), num_tokens=9, splits=[4, 4])


def test_the_laws_that_a_module_breaks_are_told_with_their_reasons(monkeypatch):
    for name in LAWS.keys() - {"segments", "causal"}:
        monkeypatch.delitem(LAWS, name)
    assert broken_laws(RunningMean) == {}
    (law, reason), *others = broken_laws(lambda: RunningMean("future leaks")).items()
    assert (law, others) == ("causal", [])
    assert reason == "a change at 1 reached the past"
    with pytest.raises(ZeroDivisionError):
        broken_laws(lambda: 1 / 0)
