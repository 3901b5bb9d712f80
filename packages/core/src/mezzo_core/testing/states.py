"""The laws of states that are handled: forked, cut into rows, started over, saved and loaded."""

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mezzo_core.errors import UserError
from mezzo_core.nn.contract import AbstractSequenceModule
from mezzo_core.nn.state_file import load_state, save_state
from mezzo_core.testing.damage import damages
from mezzo_core.testing.isolation import decode_step, normal
from mezzo_core.testing.numerics import assert_close

PROMPTS = (0, 3, 13)
"""Tokens of each row before its state is handled."""


def check_handled(module: AbstractSequenceModule) -> None:
    """Assert that states that were forked, selected or reset go on as if they never had been.

    What goes on by `forward` and what goes on by `step`, in the middle of decoding, is tried, and
    two forks whose steps take turns. With the same rows in the batch the outputs are equal to the
    bit. Beside other rows, or with fewer or more of them, they may differ by rounding: products of
    other shapes are other kernels.
    """
    with torch.no_grad():
        for begin, go_on in ((_by_forward, _forwards), (_by_steps, _steps)):
            state = begin(module)
            _check_fork(module, state, go_on)
            _check_select(module, begin(module), go_on)
            _check_reset(module, begin(module), go_on)
        _check_turns(module, _by_steps(module))


def check_saved(module: AbstractSequenceModule) -> None:
    """Assert that a saved and loaded state goes on as one that never was, to the bit.

    Files that are damaged, and those of a model with another weight, or with a weight's rows in
    another order, must be refused in one line.
    """
    other, turned = deepcopy(module), deepcopy(module)
    with torch.no_grad():
        next(other.parameters()).flatten()[0].add_(1)
        for weight in turned.parameters():
            weight.copy_(weight.flip(0))
    has_rows = not all(map(torch.equal, turned.parameters(), module.parameters()))
    with torch.no_grad(), TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        for begin, go_on in ((_by_forward, _forwards), (_by_steps, _steps)):
            x, state = _next_tokens(module, 1), begin(module)
            save_state(module, state, path, extra={"tokens": [1, 2]})
            loaded, extra = load_state(module, path)
            assert extra == {"tokens": [1, 2]}
            again = go_on(module, x, loaded)
            assert torch.equal(again, go_on(module, x, state)), "a loaded state goes on otherwise"
        for model in (other, turned) if has_rows else (other,):
            _assert_refused(model, path, "of a model with other weights")
        content = path.read_bytes()
        for what, damaged in damages(content, random.Random(0)):
            path.write_bytes(damaged)
            _assert_refused(module, path, "", what)


def check_full(module: AbstractSequenceModule, x: Tensor, state: Any) -> None:
    """Assert that a step in a full state is kept, or refused and the state left as it was.

    On a GPU nothing is tried: there the outputs of such a step may be meaningless.
    """
    if x.is_cuda:
        return
    before = [t.clone() for t in tree_leaves(state)]
    y, after = module(x, state)
    wanted = torch.cat([y, module(x, after)[0]], 1)
    try:
        y = decode_step(module, x, state)
    except ValueError:
        pairs = zip(before, tree_leaves(state), strict=True)
        same = all(torch.equal(old.nan_to_num(), now.nan_to_num()) for old, now in pairs)
        assert same, "a step that was refused changed the state"
    else:
        found = torch.cat([y, module(x, state)[0]], 1)
        assert_close("a step beyond the room, and a token", found, wanted, rtol=1e-4)


def _assert_refused(
    module: AbstractSequenceModule, path: Path, words: str, what: str = "another model"
) -> None:
    told = "no error"
    try:
        load_state(module, path)
    except UserError as error:
        told = str(error)
    refused = told != "no error" and words in told and "\n" not in told
    assert refused, f"{what} must be refused in one line, got {told}"


GoOn = Callable[[AbstractSequenceModule, Tensor, Any], Tensor]


def _check_fork(module: AbstractSequenceModule, state: Any, go_on: GoOn) -> None:
    same, other = _next_tokens(module, 1), _next_tokens(module, 2)
    forks = [module.fork(state), module.fork(state)]
    another = go_on(module, other, forks[0])
    again = go_on(module, same, module.fork(forks[1]))
    never = go_on(module, same, state)
    assert not torch.equal(another, never), "other tokens gave the same outputs"
    assert torch.equal(again, never), "a fork of a fork goes on otherwise than what was forked"
    late = go_on(module, other, forks[1])
    assert torch.equal(late, another), "what was forked wrote into the fork"


def _check_turns(module: AbstractSequenceModule, state: Any) -> None:
    """Decode with two forks in turn: a part that they share would hold the other's last token."""
    x, forks = [_next_tokens(module, seed) for seed in (1, 2)], [state, module.fork(state)]
    alone = [_steps(module, tokens, module.fork(state)) for tokens in x]
    for t in range(NEXT):
        for tokens, fork, wanted in zip(x, forks, alone, strict=True):
            y = decode_step(module, tokens[:, t : t + 1], fork)
            assert torch.equal(y, wanted[:, t : t + 1]), "a step wrote into a fork"


def _check_select(module: AbstractSequenceModule, state: Any, go_on: GoOn) -> None:
    x = _next_tokens(module, 1)
    never = go_on(module, x, module.fork(state))
    turned = module.select(state, torch.tensor([2, 0, 1], device=x.device))
    back = module.select(turned, [1, 2, 0])
    assert torch.equal(go_on(module, x, back), never), "rows turned and back go on otherwise"
    for rows in ([1, 0, 1, 2, 1], [2], [0]):
        found = go_on(module, x[rows], module.select(state, rows))
        assert_close(f"rows {rows}", found, never[rows], rtol=1e-5)
    assert torch.equal(go_on(module, x, state), never), "select changed the state that it was given"


def _check_reset(module: AbstractSequenceModule, state: Any, go_on: GoOn) -> None:
    x = _next_tokens(module, 1)
    never = go_on(module, x, module.fork(state))
    found = go_on(module, x, module.reset(state, [1]))
    first, _ = module(x[1:2], module.init_state(1))
    assert_close("the row that starts over", found[1:2], first, rtol=1e-5)
    assert_close("the other rows", found[::2], never[::2], rtol=1e-5)
    assert torch.equal(go_on(module, x, state), never), "reset changed the state that it was given"


def _by_forward(module: AbstractSequenceModule) -> Any:
    """Return a state after prompts of different lengths."""
    x = normal(module, (len(PROMPTS), max(PROMPTS), module.d_model), 0)
    lengths = torch.tensor(PROMPTS, device=x.device)
    return module(x, module.init_state(len(PROMPTS)), lengths=lengths)[1]


def _by_steps(module: AbstractSequenceModule) -> Any:
    """Return the state of `_by_forward` after two steps, with room for more."""
    state = module.reserve(_by_forward(module), 2 + NEXT)
    for x in normal(module, (2, len(PROMPTS), 1, module.d_model), 3):
        decode_step(module, x, state)
    return state


NEXT = 6
"""Tokens after a state was handled."""


def _next_tokens(module: AbstractSequenceModule, seed: int) -> Tensor:
    return normal(module, (len(PROMPTS), NEXT, module.d_model), seed)


def _forwards(module: AbstractSequenceModule, x: Tensor, state: Any) -> Tensor:
    outputs = []
    for segment in x.split([1, NEXT - 1], 1):
        y, state = module(segment, state)
        outputs.append(y)
    return torch.cat(outputs, 1)


def _steps(module: AbstractSequenceModule, x: Tensor, state: Any) -> Tensor:
    return torch.cat([decode_step(module, token, state) for token in x.split(1, 1)], 1)
