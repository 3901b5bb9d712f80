"""The law of isolation: what one token may reach, if it is NaN, infinite or very large."""

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from mezzo_core.nn.contract import AbstractSequenceModule

_NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
_LARGE = (1e38,)  # finite, but not its square


def check_isolated(
    module: AbstractSequenceModule,
    num_tokens: int,
    *,
    long: int = 0,
) -> None:
    """Assert that a NaN, an infinity or a large number stays where causality lets it be.

    These must stay bit-equal:

    - if it is in token t of row 0: what comes before t, and the other rows, without a state, with
      one and in the steps after. A NaN must show at t;
    - if it is in one of several packed sequences, or in the gradient of its outputs: the other
      sequences and their gradients;
    - if it is in padding: the real tokens, and what comes after them by any form.

    Sequences have three tokens or more. If `long` is not 0, a NaN in the last token but one of so
    many is tried too.
    """
    x = normal(module, (2, num_tokens, module.d_model), 0)
    with torch.no_grad():
        for values in (_NOT_FINITE, _LARGE):
            places = sorted({0, 1, num_tokens // 2, num_tokens - 1})
            _check_isolated_tokens(module, x, places, values)
            _check_isolated_steps(module, x, values)
            _check_isolated_packing(module, x[:1], values)
            _check_isolated_padding(module, x, values)
        if long:
            longer = normal(module, (2, long, module.d_model), 0)
            _check_isolated_tokens(module, longer, [long - 2], _NOT_FINITE[:1])
    _check_isolated_gradients(module, x[:1])


def _check_isolated_tokens(
    module: AbstractSequenceModule, x: Tensor, tokens: Sequence[int], values: Sequence[float]
) -> None:
    """Spoil one token of the first row after the other."""
    tried = list(product(values, tokens))
    clean, spoilt = _repeated(x, tried)
    y, found = (module(rows)[0].split(len(x)) for rows in (clean, spoilt))
    for (bad, t), ours, wanted in zip(tried, found, y, strict=True):
        where = f"{bad} in token {t}"
        assert torch.equal(ours[0, :t], wanted[0, :t]), f"{where} reached the past"
        assert torch.equal(ours[1:], wanted[1:]), f"{where} reached another row"
        hidden = bad != bad and bool(ours[0, t].isfinite().all())
        assert not hidden, f"{where} does not show there"


def _check_isolated_steps(
    module: AbstractSequenceModule, x: Tensor, values: Sequence[float]
) -> None:
    """Spoil a token of the first row, in the middle or early, and go on with steps."""
    tried = list(product(values, (x.shape[1] // 2, 1)))
    clean, spoilt = _repeated(x, tried)
    y, found = (_forward_and_steps(module, rows).split(len(x)) for rows in (clean, spoilt))
    for (bad, t), ours, wanted in zip(tried, found, y, strict=True):
        where = f"{bad} in token {t} reached"
        assert torch.equal(ours[0, :t], wanted[0, :t]), f"{where} the past by a state"
        assert torch.equal(ours[1:], wanted[1:]), f"{where} another row by a state"


def _repeated(x: Tensor, tried: Sequence[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    """Return all rows once for each value and token, and the same with them in the first row."""
    clean = x.repeat(len(tried), 1, 1)
    spoilt = clean.clone()
    for i, (bad, t) in enumerate(tried):
        spoilt[i * len(x), t] = bad
    return clean, spoilt


def _check_isolated_packing(
    module: AbstractSequenceModule, x: Tensor, values: Sequence[float]
) -> None:
    """Spoil one of three packed sequences after the other; all trials are packed in one row."""
    T, ends = x.shape[1], _three_sequences(x).tolist()
    tried = list(product(values, pairwise(ends)))
    clean = x.repeat(1, len(tried), 1)
    spoilt = clean.clone()
    for i, (bad, (start, end)) in enumerate(tried):
        spoilt[:, i * T + start : i * T + end] = bad
    borders = [0, *(i * T + end for i in range(len(tried)) for end in ends[1:])]
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=x.device)
    y, found = (module(row, cu_seqlens=cu_seqlens)[0].split(T, 1) for row in (clean, spoilt))
    for (bad, (start, end)), ours, wanted in zip(tried, found, y, strict=True):
        same = torch.equal(ours[:, :start], wanted[:, :start]) and torch.equal(
            ours[:, end:], wanted[:, end:]
        )
        assert same, f"{bad} in a packed sequence reached another one"


def _check_isolated_gradients(module: AbstractSequenceModule, x: Tensor) -> None:
    """Spoil the second of three packed sequences, or the gradient of its outputs."""
    borders = _three_sequences(x)
    _, start, end, _ = borders.tolist()
    given = [x, normal(module, tuple(x.shape), end)]
    clean = _gradients(module, given, borders)
    for bad in (_NOT_FINITE, _LARGE):
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


def _check_isolated_padding(
    module: AbstractSequenceModule, x: Tensor, values: Sequence[float]
) -> None:
    """Spoil the padding of prompts, and go on with two tokens by `forward` and by `step`."""
    B, T = x.shape[:2]
    x = x.repeat(len(values), 1, 1)
    lengths = torch.tensor([(T * i) // B for i in range(B)] * len(values), device=x.device)
    padding = (torch.arange(T, device=x.device) >= lengths[:, None])[..., None]
    spoilt = torch.tensor(values, device=x.device).repeat_interleave(B)[:, None, None]
    outputs = []
    for prompts in (x, torch.where(padding, spoilt, x)):
        y, state = module(prompts, module.init_state(len(x)), lengths=lengths)
        after = [y.masked_fill(padding, 0.0), module(x[:, :2], state)[0]]
        room = module.reserve(state, 2)
        after += [decode_step(module, x[:, t : t + 1], room) for t in range(2)]
        outputs.append(after)
    names = ("real tokens", "the next forward", "the next step", "the step after")
    for name, clean, found in zip(names, *outputs, strict=True):
        for bad, wanted, ours in zip(values, clean.split(B), found.split(B), strict=True):
            assert torch.equal(ours, wanted), f"{bad} in padding reached {name}"


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
