"""The shapes in public signatures are true: in tests of ops, each call of a public op is checked.

The root's conftest.py puts jaxtyping's check into the modules that hold public signatures, and
switches it on in every test in a folder `ops`. A test of bad input, or one that compiles, carries
the marker `any_shapes`: there the check would speak first, or stand in the graph.
"""

import importlib
import inspect
from pathlib import Path

import jaxtyping
import pytest
import torch
from mezzo_core.ops.attention import attention

APIS = sorted(Path(__file__).parents[1].glob("packages/*/src/*/ops/*/api.py"))
Q, K = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 6)


@pytest.fixture
def checked():
    jaxtyping.config.update("jaxtyping_disable", False)


def test_a_wrong_shape_is_caught_where_shapes_are_checked(checked):
    with pytest.raises(jaxtyping.TypeCheckError):
        attention(Q, K, K)


def test_elsewhere_the_op_itself_refuses_it():
    with pytest.raises(ValueError, match="k must"):
        attention(Q, K, K)


@pytest.mark.parametrize("path", APIS, ids=lambda path: path.parent.name)
def test_the_check_is_in_every_public_function(path):
    name = ".".join(path.relative_to(path.parents[3]).with_suffix("").parts)
    public = [
        function
        for function in vars(importlib.import_module(name)).values()
        if inspect.isfunction(function)
        and function.__module__ == name
        and function.__name__[0] != "_"
    ]
    assert public
    assert all(hasattr(function, "__wrapped__") for function in public)
