"""The shapes in public signatures are true: in tests of ops, each call of a public op is checked.

The root's conftest.py puts jaxtyping's check into the modules that hold public signatures, and
switches it on in every test in a folder `ops`. A test of bad input, or one that compiles, carries
the marker `any_shapes`: there the check would speak first, or stand in the graph.
"""

import jaxtyping
import pytest
import torch
from mezzo_core.ops.attention import attention

Q, K = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 6)


def test_a_wrong_shape_is_caught_where_shapes_are_checked():
    jaxtyping.config.update("jaxtyping_disable", False)
    with pytest.raises(jaxtyping.TypeCheckError):
        attention(Q, K, K)


def test_elsewhere_the_op_itself_refuses_it():
    with pytest.raises(ValueError, match="k must"):
        attention(Q, K, K)


def test_every_op_s_signature_is_checked():
    checked = [name for name, module in ops_modules() if hasattr(public(module), "__wrapped__")]
    assert len(checked) >= 8
