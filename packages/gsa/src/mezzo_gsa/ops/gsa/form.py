"""The options of the registered ops of gated slot attention.

A custom op takes only tensors, numbers and strings. So the fields of a form are an op's last
arguments, `op(*tensors, *form)`. Inside, the op makes the form again with `Form(*arguments)`.
"""

from typing import Literal, NamedTuple

import torch

from mezzo_gsa.ops.gsa.between import Between

Keep = Literal["nothing", "weights", "states"]
"""What a forward saves for the backward: "nothing" (there will be no backward), "weights" (the
weights of the slots), or "states" (also the memories at the chunks' borders, which the backward
otherwise computes again)."""


class Form(NamedTuple):
    """The options of the form by chunks."""

    scale: float
    between: Between
    damping: float | None
    """τ: the gates are given as logits x, and g = logsigmoid(x) / τ. None: they are given as g."""
    swish: bool
    """Whether swish is applied to q, k and v first."""
    keep: Keep


FORM_SCHEMA = "float scale, str between, float? damping, bool swish, str keep"
"""The fields of `Form`, as the schema of a registered op declares them."""


class StepForm(NamedTuple):
    """The options of a decoding step."""

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
"""The fields of `StepForm`, as the schema of a registered op declares them."""
