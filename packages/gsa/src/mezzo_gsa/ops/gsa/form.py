"""What the registered ops of gated slot attention compute.

A custom op takes only tensors, numbers and strings. So the fields of a form are an op's last
arguments, `op(*tensors, *form)`. Inside, the op makes the form again with `Form(*arguments)`.
"""

from typing import Literal, NamedTuple

import torch

from mezzo_gsa.ops.gsa.between import Between

Keep = Literal["nothing", "weights", "states"]
"""What a forward keeps for the backward: nothing (there is none), the slots' weights, or the
memories at the chunks' borders too, which are else computed once more."""


class Form(NamedTuple):
    """What the forms by chunks compute and keep, besides their tensors."""

    scale: float
    between: Between
    damping: float | None
    """τ: the gates are given as logits x, and g = logsigmoid(x) / τ. None: they are given as g."""
    swish: bool
    """Whether q, k and v go through swish first."""
    keep: Keep


FORM_SCHEMA = "float scale, str between, float? damping, bool swish, str keep"
"""The fields of `Form`, as a schema names them."""


class StepForm(NamedTuple):
    """What a decoding step computes, besides its tensors."""

    scale: float
    between: Between
    damping: float | None = None
    """See `Form`."""
    swish: bool = False
    """See `Form`."""
    norm_eps: float = 1e-5
    out_dtype: torch.dtype | None = None


STEP_FORM_SCHEMA = (
    "float scale, str between, float? damping, bool swish, float norm_eps, ScalarType? out_dtype"
)
"""The fields of `StepForm`, as a schema names them."""
