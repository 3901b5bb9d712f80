"""The law of isolation: what one token may reach, if it is NaN, infinite or very large."""

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from mezzo_core.nn.contract import AbstractSequenceModule

_BAD = (float("nan"), float("inf"), float("-inf"), 1e38)  # the last: finite, but not its square


def check_isolated(
    module: AbstractSequenceModule,
    num_tokens: int,
    *,
    long: int = 0,
    batch: int = 2,
    seed: int = 0,
) -> None:
    """Assert that a NaN, an infinity or a large number stays where causality lets it be.

    In token t of row 0 it leaves what comes before t, and the other rows, bit-equal, without and
    with a state and in the steps after, and a NaN shows at t. In one of several packed sequences,
    or in the gradient of its outputs, it leaves the others and their gradients bit-equal. In
    padding it leaves the real tokens, and what comes after them by any form, bit-equal.

    Args:
        module: the module under test.
        num_tokens: length T of the sequences, at least 3.
        long: if not 0, the tokens of a longer sequence, in which a NaN in the last
            token but one is tried.
        batch: number of sequences, at least 2.
        seed: of the inputs.
    """
    x = normal(module, (batch, num_tokens, module.d_model), seed)
    with torch.no_grad():
        _check_isolated_tokens(module, x, sorted({0, 1, num_tokens // 2, num_tokens - 1}), _BAD)
        if long:
            longer = normal(module, (batch, long, module.d_model), seed)
            _check_isolated_tokens(module, longer, [long - 2], _BAD[:1])
        decoded = _forward_and_steps(module, x)
        for bad in _BAD:
            t, other = num_tokens // 2, x.clone()
            other[0, t] = bad
            found, where = _forward_and_steps(module, other), f"{bad} in token {t} reached"
            assert torch.equal(found[0, :t], decoded[0, :t]), f"{where} the past by a state"
            assert torch.equal(found[1:], decoded[1:]), f"{where} another row by a state"
            _check_isolated_packing(module, x[:1], bad)
            _check_isolated_padding(module, x, bad)
    _check_isolated_gradients(module, x[:1])


def _check_isolated_tokens(
    module: AbstractSequenceModule, x: Tensor, tokens: Sequence[int], values: Sequence[float]
) -> None:
    """Spoil one token of the first row after the other."""
    y, _ = module(x)
    for bad, t in product(values, tokens):
        other = x.clone()
        other[0, t] = bad
        found, _ = module(other)
        where = f"{bad} in token {t}"
        assert torch.equal(found[0, :t], y[0, :t]), f"{where} reached the past"
        assert torch.equal(found[1:], y[1:]), f"{where} reached another row"
        hidden = bad != bad and bool(found[0, t].isfinite().all())
        assert not hidden, f"{where} does not show there"


def _check_isolated_packing(module: AbstractSequenceModule, x: Tensor, bad: float) -> None:
    """Spoil one of three packed sequences after the other."""
    borders = _three_sequences(x)
    y, _ = module(x, cu_seqlens=borders)
    for start, end in pairwise(borders.tolist()):
        other = x.clone()
        other[:, start:end] = bad
        found, _ = module(other, cu_seqlens=borders)
        same = torch.equal(found[:, :start], y[:, :start]) and torch.equal(
            found[:, end:], y[:, end:]
        )
        assert same, f"{bad} in a packed sequence reached another one"


def _check_isolated_gradients(module: AbstractSequenceModule, x: Tensor) -> None:
    """Spoil the second of three packed sequences, or the gradient of its outputs."""
    borders = _three_sequences(x)
    _, start, end, _ = borders.tolist()
    given = [x, normal(module, tuple(x.shape), end)]
    clean = _gradients(module, given, borders)
    for bad in (_BAD[:3], _BAD[3:]):
        values = torch.tensor(bad, device=x.device).repeat(end)[: end - start, None]
        for place, name in enumerate(("a packed sequence", "a packed sequence's gradient")):
            spoilt = [part.clone() for part in given]
            spoilt[place][:, start:end] = values
            found = _gradients(module, spoilt, borders)
            where = f"{bad} in {name} reached another one's gradient"
            assert torch.equal(found[:, :start], clean[:, :start]), where
            assert torch.equal(found[:, end:], clean[:, end:]), where


def _gradients(module: AbstractSequenceModule, given: list[Tensor], borders: Tensor) -> Tensor:
    x, dy = given[0].detach().requires_grad_(), given[1]
    return torch.autograd.grad(module(x, cu_seqlens=borders)[0], x, dy)[0]


def _three_sequences(x: Tensor) -> Tensor:
    T = x.shape[1]
    return torch.tensor([0, T // 3, T - T // 3, T], dtype=torch.int32, device=x.device)


def _check_isolated_padding(module: AbstractSequenceModule, x: Tensor, bad: float) -> None:
    """Spoil the padding of prompts, and go on with two tokens by `forward` and by `step`."""
    B, T = x.shape[:2]
    lengths = torch.tensor([(T * i) // B for i in range(B)], device=x.device)
    padding = torch.arange(T, device=x.device) >= lengths[:, None]
    outputs = []
    for prompts in (x, x.masked_fill(padding[..., None], bad)):
        y, state = module(prompts, module.init_state(B), lengths=lengths)
        after = [y[~padding], module(x[:, :2], state)[0]]
        room = module.reserve(state, 2)
        after += [decode_step(module, x[:, t : t + 1], room) for t in range(2)]
        outputs.append(after)
    names = ("real tokens", "the next forward", "the next step", "the step after")
    for name, clean, found in zip(names, *outputs, strict=True):
        assert torch.equal(found, clean), f"{bad} in padding reached {name}"


def _forward_and_steps(module: AbstractSequenceModule, x: Tensor) -> Tensor:
    """Return the outputs of x with a state, and of two more steps, (B, T + 2, C)."""
    y, state = module(x, module.init_state(len(x)))
    room = module.reserve(state, 2)
    return torch.cat([y, *(decode_step(module, x[:, :1], room) for _ in range(2))], 1)


def normal(module: AbstractSequenceModule, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw on the CPU, so that a seed means the same numbers on every device."""
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def decode_step(module: AbstractSequenceModule, x: Tensor, state: Any) -> Tensor:
    """Decode one token of every row as a decoder does."""
    module.before_step(state)
    return module.step(x, state)
