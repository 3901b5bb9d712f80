"""Tests public functions with wrong arguments: they must raise a clear error, or compute correctly.

Each argument of a valid call is replaced in turn by other values.

A package lists its calls (`Call`) and configurations (`Configured`), and tests them all:

    @pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
    def test_each_argument_replaced_is_named_or_right(call):
        check_arguments(call)
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mezzo_core.nn.contract import AbstractSequenceModule
from mezzo_core.testing.numerics import assert_close

# Values that are wrong for every argument.
_NEVER = {
    "a string": "no such choice",
    "a list": [1.0, 2.0],
    "a dict": {},
    "an object": object(),
    "a complex number": 1j,
}
# Replacements for a field of a configuration; most have a wrong type.
_VALUES: tuple[Any, ...] = (
    "x", "", "hub:../x", None, True, False, 0, 1, -1, 3, 1.5, math.nan, math.inf, -math.inf, 1e308,
    2**70, (), (1,), (1.0, "x"), (math.nan, 2.0), [], {}, object(), 1j,
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A valid call of a public function.

    Attributes:
        function: the function to call.
        arguments: returns new arguments by name at each call, so that the function may overwrite
            them.
        optional: names of the arguments that may also be None.
        definition: a function with the same arguments that computes the expected result; with None
            the results only have to be finite.
        words: for an argument, other words by which a message may name it.
        of_any_rank: names of the tensors that may have one axis more or less.
    """

    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]
    optional: frozenset[str] = frozenset()
    definition: Callable[..., Any] | None = None
    words: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    of_any_rank: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The names of the function and its given arguments, for a test's id."""
        given = [name for name, value in self.arguments().items() if value is not None]
        function = getattr(self.function, "__name__", type(self.function).__name__)
        return f"{function}({','.join(given)})"


class Replacement(NamedTuple):
    """A value that replaces an argument."""

    what: str
    value: Any
    must_refuse: bool
    """Whether it must raise an error. Otherwise a correct result is fine too."""
    is_relative: bool = False
    """Whether it is only wrong in combination with the other arguments. Then the message may name
    any of them."""


def check_arguments(call: Call) -> None:
    """Replace each argument of a call, one at a time, by each of its `replacements`.

    Raises:
        AssertionError: if a replacement is accepted that must be refused, gives a wrong result, or
            raises anything other than a TypeError or ValueError of one line that names the
            argument. The message has one line for each such replacement.
    """
    faults = [find_fault(call, {})]
    for name, value in call.arguments().items():
        faults += [find_fault(call, {name: part}) for part in replacements(value)]
        if value is not None and name not in call.optional:
            faults.append(find_fault(call, {name: Replacement("None", None, True)}))
    _assert_none(faults)


def find_fault(call: Call, replaced: Mapping[str, Replacement]) -> str | None:
    """Make a call with replaced arguments; return what is wrong with its outcome, or None."""
    told = f"{call.name}: " + ", ".join(f"{name} is {part.what}" for name, part in replaced.items())
    arguments = {**call.arguments(), **{name: part.value for name, part in replaced.items()}}
    try:
        with torch.no_grad():
            result = call.function(**arguments)
            expected = None
            if call.definition is not None:
                expected = call.definition(**{**call.arguments(), **arguments})
    except Exception as error:
        if not replaced:
            raise
        is_relative = any(part.is_relative for part in replaced.values())
        if is_relative and ("on meta" in str(error) or "device" in str(error)):
            return None  # it may disagree with a layer's weight; then the message is torch's own
        blamed = arguments if is_relative else replaced
        return _fault_of(told, error, [w for n in blamed for w in (n, *call.words.get(n, ()))])
    for name, part in replaced.items():
        if part.must_refuse and not (part.is_relative and name in call.of_any_rank):
            return f"{told}: accepted"
    return _fault_of_result(told, result, expected)


def check_module_arguments(module: AbstractSequenceModule) -> None:
    """Replace each argument of the `forward`, `step` and `reserve` of a mixer, a block or a stack.

    It is on a CPU, in float32. States have seen tokens. A state with a part replaced must be
    refused, or give what it gave before.

    Raises:
        AssertionError: as in `check_arguments`.
    """
    x = torch.randn(2, 5, module.d_model, generator=torch.Generator().manual_seed(0))
    borders, lengths = torch.tensor([0, 2, 5]), torch.tensor([4, 4])
    with torch.no_grad():
        _, grown = module(x, module.init_state(2))
        ready = module.reserve(grown, 3)
        module.before_step(ready)

    def forward(**given: Any) -> Tensor:
        return module(**given)[0]

    def step(**given: Any) -> Tensor:
        leaves = [leaf for leaf in tree_leaves(given["state"]) if isinstance(leaf, Tensor)]
        before = [leaf.clone() for leaf in leaves]
        try:
            return module.step(**given)
        finally:  # replacements share what they do not replace
            for leaf, old in zip(leaves, before, strict=True):
                leaf.copy_(old)

    def reserve(state: Any, num_tokens: int = 1) -> Tensor:
        reserved = module.reserve(state, num_tokens)
        module.before_step(reserved)
        return module.step(x[:, :1], reserved)

    optional = frozenset({"state", "lengths", "cu_seqlens"})
    for call in (
        Call(forward, lambda: {"x": x}),
        Call(forward, lambda: {"x": x[:1], "cu_seqlens": borders}, optional),
        Call(
            forward,
            lambda: {"x": x, "state": grown, "lengths": lengths},
            optional,
            lambda **given: forward(**given | {"state": grown}),
        ),
        Call(
            step,
            lambda: {"x": x[:, :1], "state": ready},
            definition=lambda **given: step(**given | {"state": ready}),
        ),
        Call(reserve, lambda: {"state": grown}, definition=lambda state: reserve(grown)),
    ):
        check_arguments(call)
    call = Call(reserve, lambda: {"state": grown, "num_tokens": 1})
    counts = [part for part in replacements(1) if part.what != "0"]
    _assert_none([find_fault(call, {"num_tokens": part}) for part in counts])


def replacements(value: Any) -> list[Replacement]:
    """Return the replacements to try for a valid argument; none for None."""
    if value is None:
        return []
    found = [Replacement(what, other, True) for what, other in _NEVER.items()]
    if isinstance(value, Tensor):
        found += _other_tensors(value)
    elif hasattr(value, "_fields"):
        found += _other_states(value)
    elif isinstance(value, tuple):
        found += _other_parts(value, dict(enumerate(value)))
    elif isinstance(value, int) and not isinstance(value, bool):
        found += [Replacement(str(n), n, True) for n in (0, -1, 1.5, math.nan, True)]
    elif isinstance(value, float):
        found += [Replacement(str(x), x, True) for x in (math.nan, math.inf, -math.inf, 10**30)]
        found += [Replacement(str(x), x, False) for x in (0.0, -1.0, 1e-3, 2)]
    return found


def check_fields(valid: Any, use: Callable[[Any], Tensor]) -> None:
    """Replace each field of a configuration by values of many types.

    Args:
        valid: a valid configuration, a frozen dataclass.
        use: builds and runs the configured object, and returns numbers that must be finite.

    Raises:
        AssertionError: if a value gives NaN or infinity, or raises anything other than a TypeError
            or ValueError of one line that names the field (from the class or from `use`).
    """
    faults: list[str | None] = []
    for field in dataclasses.fields(valid):
        for value in _VALUES:
            told = f"{type(valid).__name__}({field.name}={value!r})"
            try:
                result = use(dataclasses.replace(valid, **{field.name: value}))
            except Exception as error:
                faults.append(_fault_of(told, error, [field.name]))
            else:
                faults.append(_fault_of_result(told, result, None))
    _assert_none(faults)


def _assert_none(faults: Sequence[str | None]) -> None:
    found = [fault for fault in faults if fault is not None]
    assert not found, f"{len(found)} of {len(faults)}:\n" + "\n".join(found)


def _fault_of(told: str, error: Exception, names: Sequence[str]) -> str | None:
    if not isinstance(error, (TypeError, ValueError)):
        return f"{told}: {type(error).__name__}: {error}"
    if "\n" in str(error):
        return f"{told}: more than one line: {error}"
    if not any(name in str(error) for name in names):
        return f"{told}: not named: {error}"
    return None


def _fault_of_result(told: str, result: Any, expected: Any) -> str | None:
    results = [part for part in _tensors(result) if not part.is_meta]
    if not all(part.isfinite().all() for part in results):
        return f"{told}: accepted, and gives NaN"
    try:
        for got, wanted in zip(results, _tensors(expected), strict=False):
            assert_close("result", got, wanted, rtol=1e-4)
    except AssertionError as error:
        return f"{told}: {error}"
    return None


def _other_tensors(x: Tensor) -> list[Replacement]:
    other = torch.int64 if x.is_floating_point() else torch.float32
    found = [
        Replacement("a number", 3, True),
        Replacement("an array", x.numpy(), True),
        Replacement("complex", x.to(torch.complex64), True),
        Replacement(str(other), x.to(other), True),
        Replacement("a scalar", x.new_ones(()), True, True),
        Replacement("on another device", x.to("meta"), False, True),
        Replacement("with an axis more", x[None], True, True),
        Replacement("with an axis less", x[0], True, True),
        Replacement("strided", x.repeat_interleave(2, -1)[..., ::2], False),
    ]
    if x.dtype != torch.bool:
        found.append(Replacement("bool", torch.ones_like(x, dtype=torch.bool), True))
    if x.is_floating_point():
        found.append(Replacement("float8", x.to(torch.float8_e4m3fn), True))
    for axis in range(x.ndim):
        found.append(Replacement(f"doubled along {axis}", torch.cat([x, x], axis), False, True))
        found.append(Replacement(f"empty along {axis}", x.narrow(axis, 0, 0), False, True))
        fewer = x.narrow(axis, 0, max(x.shape[axis] - 1, 0))
        found.append(Replacement(f"one less along {axis}", fewer, False, True))
    return found


def _other_states(state: Any) -> list[Replacement]:
    parts = _other_parts(state, state._asdict())
    return [Replacement("a plain tuple", tuple(state), True), *parts]


def _other_parts(whole: Any, parts: Mapping[Any, Any]) -> list[Replacement]:
    found, kinds = [], get_type_hints(type(whole))
    for i, (name, value) in enumerate(parts.items()):
        is_optional = NoneType in get_args(kinds.get(name))
        others = [*replacements(value), Replacement("None", None, not is_optional)]
        for what, other, must, relative in others:
            changed = (*whole[:i], other, *whole[i + 1 :])
            made = whole._make(changed) if hasattr(whole, "_make") else changed
            found.append(Replacement(f"with {name} {what}", made, must, relative))
    return found


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple):
        for part in result:
            yield from _tensors(part)
