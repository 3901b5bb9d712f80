"""The laws of the contract, for any mixer, block or stack: checks that every package's tests call.

Inputs are float32, random normal from a fixed seed, on the device of the weights. Wherever a token
is decoded by `step`, `before_step` comes first, as in a decoder. `rtol` is the allowed relative
error in norm.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from copy import deepcopy
from itertools import accumulate, product
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mezzo_core.nn.contract import AbstractSequenceModule
from mezzo_core.testing.isolation import check_isolated, decode_step, normal
from mezzo_core.testing.numerics import assert_close
from mezzo_core.testing.programs import check_programs
from mezzo_core.testing.states import check_full, check_handled, check_saved
from mezzo_core.testing.training import (
    check_empty,
    check_gradients,
    check_padding_gradients,
    check_precision,
    check_training,
)

_Form = TypeVar("_Form")


def check_segments(
    module: AbstractSequenceModule,
    *,
    num_tokens: int,
    splits: Sequence[int],
    more: Sequence[Sequence[int]] = (),
    batch: int = 2,
    rtol: float = 1e-5,
) -> None:
    """Assert that full forward == the given segments == one token at a time; states stay intact.

    The same holds if `prefill` reads the first half of the tokens, with padding behind them.
    The lengths of the segments, in `splits` and in each of `more`, add up to `num_tokens`; zeros
    are legal.
    """
    every = [list(lengths) for lengths in (splits, *more)]
    for lengths in every:
        if sum(lengths) != num_tokens:
            raise ValueError(f"splits must add up to {num_tokens} tokens, got {lengths}")
    x = normal(module, (batch, num_tokens, module.d_model), 0)
    with torch.no_grad():
        full, no_state = module(x)
        assert no_state is None, "without a state, forward must return None as the state"
        whole, state = module(x, module.init_state(batch))
        assert state is not None, "with a state, forward must return the state"
        assert_close("whole with a state", whole, full, rtol=rtol)
        for lengths in every:
            assert_close(f"segments {lengths}", _run(module, x, lengths), full, rtol=rtol)
        assert_close("step by step", _run(module, x, [1] * num_tokens), full, rtol=rtol)
        half, begun = (num_tokens + 1) // 2, module.init_state(batch)
        read = torch.full((batch,), half, device=x.device)
        last, state = module.prefill(x[:, : half + 2], begun, lengths=read)
        found = torch.cat([last, module(x[:, half:], state)[0]], 1)
        assert_close("from a prefill on", found, full[:, half - 1 :], rtol=rtol)


def check_causal(module: AbstractSequenceModule) -> None:
    """Assert that a change at token t leaves every output before t bit-equal, and not all after."""
    T = 18
    x = normal(module, (2, T, module.d_model), 0)
    with torch.no_grad():
        y, _ = module(x)
        for t in (0, 1, T // 2, T - 1):
            other = x.clone()
            other[:, t:] = normal(module, (2, T - t, module.d_model), 1 + t)
            changed, _ = module(other)
            assert torch.equal(changed[:, :t], y[:, :t]), f"a change at {t} reached the past"
            assert not torch.equal(changed[:, t:], y[:, t:]), f"a change at {t} reached nothing"


def check_packed(
    module: AbstractSequenceModule,
    lengths: Sequence[int],
    *,
    rtol: float = 1e-5,
    dtype: torch.dtype = torch.int32,
) -> None:
    """Assert that sequences packed in one row give what each gives alone, gradients included.

    Some may have no tokens. `dtype` is that of the borders.
    """
    borders = [0, *accumulate(lengths)]
    x = normal(module, (1, borders[-1], module.d_model), 0).requires_grad_()
    dy = normal(module, (1, borders[-1], module.d_model), 1)
    cu_seqlens = torch.tensor(borders, dtype=dtype, device=x.device)
    packed, _ = module(x, cu_seqlens=cu_seqlens)
    alone = torch.cat(
        [module(part)[0] for part in x.split(list(lengths), dim=1) if part.shape[1]], 1
    )
    assert_close(f"packed {list(lengths)}", packed, alone, rtol=rtol)
    (dx,) = torch.autograd.grad(packed, x, dy)
    (dx_alone,) = torch.autograd.grad(alone, x, dy)
    assert_close(f"dx, packed {list(lengths)}", dx, dx_alone, rtol=rtol)


def check_ragged(
    module: AbstractSequenceModule,
    prompt_lengths: Sequence[int],
    steps: int,
    *,
    rtol: float = 1e-5,
) -> None:
    """Assert that a batch of prompts of different lengths decodes as each row would alone.

    The prompts are padded on the right with loud garbage and given with `lengths=`; then come
    `steps` single tokens for all rows. Every row must match a full forward of its own tokens. The
    same holds for `look_ahead` where only the first half of a prompt is certain. A prompt may have
    no tokens.
    """
    prompts, rows = _prompts(module, prompt_lengths, steps)
    lengths = torch.tensor(prompt_lengths, device=prompts.device)
    with torch.no_grad():
        first = module.init_state(len(rows))
        y, state = module(prompts, first, lengths=lengths)
        _assert_goes_on(module, rows, prompt_lengths, y, state, steps, rtol)
        certain = lengths // 2
        ahead, state = module.look_ahead(prompts, first, lengths, certain)
        for row, length in enumerate(prompt_lengths):
            if length:
                assert_close(f"row {row} ahead", ahead[row, :length], y[row, :length], rtol=rtol)
        _assert_goes_on(module, rows, certain.tolist(), ahead, state, steps, rtol)


def check_step(
    module: AbstractSequenceModule,
    prompt_lengths: Sequence[int],
    steps: int,
    *,
    rtol: float = 1e-5,
) -> None:
    """Assert that decoding in place gives what a full forward gives, in buffers that stay.

    The prompts run as in `check_ragged`; then come `reserve` and single tokens through `step`. No
    tensor of the reserved state may move, and the state that was given to `reserve` must stay as it
    was. Then `forward` goes on from the stepped state, and must leave it alone. Lastly a step
    beyond the room must be right, or refused on a CPU. There are two steps or more.
    """
    prompts, rows = _prompts(module, prompt_lengths, steps)
    lengths = torch.tensor(prompt_lengths, device=prompts.device)
    with torch.no_grad():
        y, given = module(prompts, module.init_state(len(rows)), lengths=lengths)
        prompts.zero_(), lengths.zero_()  # what a caller uses again must be in no state
        outputs, before = [y], [t.clone() for t in tree_leaves(given)]
        state = module.reserve(given, steps - 1)
        places = [t.data_ptr() for t in tree_leaves(state)]
        for step in range(steps - 1):
            outputs.append(decode_step(module, _tokens(rows, prompt_lengths, step), state))
        moved = [t.data_ptr() for t in tree_leaves(state)] != places
        assert not moved, "step moved a tensor of the state"
        for field, (old, now) in enumerate(zip(before, tree_leaves(given), strict=True)):
            assert _is_same(old, now), f"step overwrote field {field} that reserve was given"
        last = _tokens(rows, prompt_lengths, steps - 1)
        outputs.append(_forward(module, last, state)[0])
        _assert_rows(module, rows, prompt_lengths, outputs, rtol)
        check_full(module, last, state)


def check_state_bytes(module: AbstractSequenceModule) -> None:
    """Assert that `state_bytes` tells the bytes that one sequence holds after 1, 8 and 15 tokens.

    On a GPU, `state_bytes` and `host_state_bytes` are compared each with the tensors of its side.
    On a CPU there is one side, and their sum counts. Counters (integer tensors) may be counted or
    left out. The same holds in bfloat16. A state must not be a view that keeps a whole segment.
    """
    module = deepcopy(module)
    for dtype, T in product((torch.float32, torch.bfloat16), (1, 8, 15)):
        with torch.no_grad():
            x = normal(module.to(dtype), (1, T, module.d_model), 0).to(dtype)
            _, state = module(x, module.init_state(1))
        here = [t for t in tree_leaves(state) if t.device == x.device]
        elsewhere = [t for t in tree_leaves(state) if t.device != x.device]
        told = module.state_bytes(T), module.host_state_bytes(T)
        if x.device.type == "cpu":
            told = sum(told), 0
        sides = zip(("state", "host_state"), (here, elsewhere), told, strict=True)
        for name, tensors, count in sides:
            values = sum(t.nbytes for t in tensors if t.is_floating_point())
            total = sum(t.nbytes for t in tensors)
            assert values <= count <= total, (
                f"{name}_bytes({T}) = {count}, but the state holds {values} bytes of values there "
                f"({total} with counters)"
            )
            storages = {t.data_ptr(): t for t in (t.untyped_storage() for t in tensors)}
            kept = sum(t.nbytes() for t in storages.values())
            assert kept <= total, (
                f"after {T} tokens the state's {total} bytes are views that keep {kept} in memory"
            )


def check_plain_state(module: AbstractSequenceModule) -> None:
    """Assert that a new state has plain tensors, whatever the class of the weights.

    FSDP and quantization make weights of another class, and `weight.new_zeros` keeps that class.
    And that the module has no tensors but weights and saved buffers, since it is loaded from these.
    """
    for name, part in module.named_modules():
        lost = {key for key, value in vars(part).items() if isinstance(value, Tensor)}
        lost |= part._non_persistent_buffers_set
        assert not lost, f"{name or 'the module'} has tensors that are never saved: {sorted(lost)}"
    module = deepcopy(module)
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(weight.detach().as_subclass(_OtherClass)))
    kinds = {type(tensor) for tensor in tree_leaves(module.init_state(2))}
    assert kinds == {Tensor}, f"the state is of {kinds}"


class _OtherClass(Tensor):
    pass


def check_long(module: AbstractSequenceModule) -> None:
    """Assert the laws once beyond 64 tokens, which is the chunk of most kernels.

    Segments of 61, 0 and 16 tokens, one of 75 with two steps after it, and packed sequences of 67
    and 10 tokens equal a full forward.
    """
    x = normal(module, (2, 77, module.d_model), 0)
    with torch.no_grad():
        full, _ = module(x)
        assert_close("61, 0 and 16 tokens", _run(module, x, (61, 0, 16)), full, rtol=2e-5)
        y, state = module(x[:, :75], module.init_state(2))
        room = module.reserve(state, 2)
        steps = [decode_step(module, x[:, t : t + 1], room) for t in (75, 76)]
        assert_close("75 tokens and 2 steps", torch.cat([y, *steps], 1), full, rtol=2e-5)
    check_packed(module, (67, 10), rtol=2e-5)


def check_flops(module: AbstractSequenceModule) -> None:
    """Assert that the FLOPs told are about those of the weights and of the state.

    A token multiplies each matrix once or twice, or only some of them, and takes up to 8 FLOPs for
    each value of the state. So this sees a count that is several times too small or too large.
    """
    T = 19
    with torch.no_grad():
        x = normal(module, (1, T, module.d_model), 0)
        _, state = module(x, module.init_state(1))
    held = sum(t.numel() for t in tree_leaves(state) if t.is_floating_point())
    weights = sum(
        weight.numel()
        for part in module.modules()
        if not isinstance(part, nn.Embedding)
        for weight in part.parameters(recurse=False)
        if weight.ndim == 2
    )
    told, most = module.flops_per_token(T), 4 * weights + 8 * held
    assert weights <= told <= most, (
        f"flops_per_token({T}) = {told}, but matrices of {weights} weights and a state of {held} "
        f"values take from {weights} to {most}"
    )


def _segments(module: AbstractSequenceModule) -> None:
    check_segments(module, num_tokens=19, splits=(4, 0, 5, 10), more=((1, 2, 16),))


def _packed(module: AbstractSequenceModule) -> None:
    check_packed(module, (13, 1, 9))
    check_packed(module, (0, 5, 0, 0, 12), dtype=torch.int64)


LAWS: dict[str, Callable[[AbstractSequenceModule], None]] = {
    "segments": _segments,
    "causal": check_causal,
    "isolated": lambda module: check_isolated(module, 13, long=70),
    "packed": _packed,
    "ragged": lambda module: check_ragged(module, (0, 3, 13), 7),
    "step": lambda module: check_step(module, (0, 3, 13), 7),
    "handled": check_handled,
    "saved": check_saved,
    "programs": check_programs,
    "state bytes": check_state_bytes,
    "plain state": check_plain_state,
    "training": check_training,
    "gradients": check_gradients,
    "padding's gradients": check_padding_gradients,
    "empty": check_empty,
    "precision": check_precision,
    "long": check_long,
    "flops": check_flops,
}
"""Every law at sizes for chunks of a few tokens, and `long` and `isolated` beyond one of 64 too."""

OF_STATES = ("handled", "saved", "programs")
"""Laws about what states hold: of several forms with the same state, one is enough."""


def each_law(forms: Iterable[_Form], as_others: Container[_Form]) -> list[tuple[_Form, str]]:
    """Return each form with each law to try; `as_others` have the same state as other forms."""
    every = product(forms, LAWS)
    return [(form, law) for form, law in every if form not in as_others or law not in OF_STATES]


def broken_laws(build: Callable[[], AbstractSequenceModule]) -> dict[str, str]:
    """Return the laws that a module breaks, each with the first line of why.

    The module may be of any project, wrapped in the contract's methods. A law is broken too where
    the module raises an error, such as for what it does not offer. Each law gets a new module.
    """
    broken = {}
    for name, law in LAWS.items():
        module = build()
        try:
            law(module)
        except Exception as error:
            broken[name] = f"{error}".partition("\n")[0] or type(error).__name__
    return broken


def _run(module: AbstractSequenceModule, x: Tensor, splits: Sequence[int]) -> Tensor:
    """Run segment after segment, and assert that no call overwrites the state that it was given."""
    state: Any = module.init_state(x.shape[0])
    outputs = []
    for segment in x.split(list(splits), dim=1):
        y, state = _forward(module, segment, state)
        outputs.append(y)
    return torch.cat(outputs, dim=1)


def _forward(module: AbstractSequenceModule, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Call the module, and assert that it does not overwrite the state that it was given."""
    before = [t.clone() for t in tree_leaves(state)]
    y, after = module(x, state)
    for field, (old, now) in enumerate(zip(before, tree_leaves(state), strict=True)):
        assert _is_same(old, now), f"forward overwrote field {field} of the state it got"
    return y, after


def _is_same(old: Tensor, now: Tensor) -> bool:
    """Tell whether a state's tensor is unchanged. Room, which nobody has written, may hold NaN."""
    return old.shape == now.shape and torch.allclose(old, now, rtol=0, atol=0, equal_nan=True)


def _prompts(
    module: AbstractSequenceModule,
    prompt_lengths: Sequence[int],
    steps: int,
) -> tuple[Tensor, list[Tensor]]:
    """Return prompts padded with loud garbage, and all tokens of each row, (1, T, C)."""
    prompts = 10 * normal(module, (len(prompt_lengths), max(prompt_lengths), module.d_model), 0)
    rows = [
        normal(module, (1, length + steps, module.d_model), 1 + i)
        for i, length in enumerate(prompt_lengths)
    ]
    for prompt, row, length in zip(prompts, rows, prompt_lengths, strict=True):
        prompt[:length] = row[0, :length]
    return prompts, rows


def _tokens(rows: Sequence[Tensor], prompt_lengths: Sequence[int], step: int) -> Tensor:
    """Return each row's token at `step` steps after its prompt, (B, 1, C)."""
    return torch.cat([row[:, n + step, None] for row, n in zip(rows, prompt_lengths, strict=True)])


def _assert_goes_on(
    module: AbstractSequenceModule, rows: Sequence[Tensor], prompt_lengths: Sequence[int],
    y: Tensor, state: Any, steps: int, rtol: float,
) -> None:  # fmt: skip
    """Compare each row's outputs of the prompt, and of single tokens from the state behind it."""
    outputs = [y]
    for step in range(steps):
        out, state = module(_tokens(rows, prompt_lengths, step), state)
        outputs.append(out)
    rows = [row[:, : n + steps] for row, n in zip(rows, prompt_lengths, strict=True)]
    _assert_rows(module, rows, prompt_lengths, outputs, rtol)


def _assert_rows(
    module: AbstractSequenceModule, rows: Sequence[Tensor], prompt_lengths: Sequence[int],
    outputs: Sequence[Tensor], rtol: float,
) -> None:  # fmt: skip
    """Compare each row's outputs, of the padded prompts and then of each step, with its forward."""
    for i, (row, length) in enumerate(zip(rows, prompt_lengths, strict=True)):
        if row.shape[1]:
            y = torch.cat([outputs[0][i, :length], *(step[i] for step in outputs[1:])])
            name = f"row {i} (prompt of {length})"
            assert_close(name, y[None], module(row)[0], rtol=rtol)
