"""The options of a layer of gated linear attention: its operations between its projections.

A custom op takes only tensors, numbers and strings. So the fields of a form are an op's last
arguments, `op(*tensors, *form.as_arguments())`. Inside, the op makes the form again with
`LayerForm(*arguments)`.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from mezzo_core.ops.checks import check_number

StepMap = Literal["relu", "swish"]


@dataclass(frozen=True)
class LayerForm:
    """The options of a GLA, HGRN2 or RetNet layer, for `step_gla_layer_`.

    Raises:
        TypeError: if a field that must be a number is not one.
        ValueError: if a field is out of range; the message names it.
    """

    scale: float = 1.0
    """Multiplies the queries."""
    feature_map: StepMap | None = None
    """Applied to queries and keys."""
    damping: float | None = None
    """τ of the gates exp(g) = sigmoid(logits)^(1 / τ). None: the gates are given as g."""
    lower_bound: float = 0.0
    """β of the forget gates β + (1 - β) exp(g)."""
    rope_base: float | None = None
    """Base of RoPE, which rotates queries and keys (`mezzo_core.positions`); None: no RoPE."""
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.feature_map is not None and self.feature_map not in get_args(StepMap):
            raise ValueError(
                f"feature_map must be None or one of {get_args(StepMap)}, got {self.feature_map!r}"
            )
        for name in ("damping", "rope_base", "norm_eps"):
            value = getattr(self, name)
            if value is not None or name == "norm_eps":
                check_number("LayerForm", name, value, positive=True)
        check_number("LayerForm", "scale", self.scale)
        check_number("LayerForm", "lower_bound", self.lower_bound)
        if not 0 <= self.lower_bound < 1:
            raise ValueError(f"lower_bound must be in [0, 1), got {self.lower_bound}")

    def as_arguments(self) -> tuple[Any, ...]:
        """Return the fields as plain arguments, in the order of `LAYER_FORM_SCHEMA`."""
        return (
            self.scale,
            self.feature_map,
            self.damping,
            self.lower_bound,
            self.rope_base,
            self.norm_eps,
        )


LAYER_FORM_SCHEMA = (
    "float scale, str? feature_map, float? damping, float lower_bound, float? rope_base, "
    "float norm_eps"
)
"""The fields of `LayerForm`, as the schema of a registered op declares them."""
