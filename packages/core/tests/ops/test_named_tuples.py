"""Named tuples: fields are replaced, also in compiled code, and make a part of an op's schema."""

from typing import Literal, NamedTuple

import pytest
import torch
from mezzo_core.ops.form import schema_of
from mezzo_core.ops.named_tuples import replaced
from torch import Tensor


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None = None


def test_some_fields_are_replaced_and_others_stay():
    x, y = torch.ones(2), torch.zeros(2)
    found = replaced(Pair(x), second=y)
    assert type(found) is Pair
    assert found.first is x
    assert found.second is y


def test_a_field_that_is_not_there_is_refused():
    with pytest.raises(TypeError, match="third"):
        replaced(Pair(torch.ones(2)), third=1)


def test_it_compiles_into_one_graph():
    def double(pair):
        return replaced(pair, first=2 * pair.first).first

    compiled = torch.compile(double, fullgraph=True, backend="eager")
    assert torch.equal(compiled(Pair(torch.ones(2))), torch.full((2,), 2.0))


class Form(NamedTuple):
    size: int
    scale: float
    is_new: bool
    name: str
    way: Literal["there", "back"] | None
    dtype: torch.dtype | None = None
    numbers: tuple[float, ...] | None = None


def test_fields_become_a_part_of_a_schema_that_torch_reads():
    declared = schema_of(Pair, Form)
    assert declared == (
        "Tensor first, Tensor? second, SymInt size, float scale, bool is_new, str name, "
        "str? way, ScalarType? dtype, float[]? numbers"
    )
    torch._C.parse_schema(f"mezzo::op({declared}) -> Tensor")


def test_a_field_that_no_op_takes_is_refused():
    class Wrong(NamedTuple):
        sizes: dict

    with pytest.raises(KeyError, match="dict"):
        schema_of(Wrong)
