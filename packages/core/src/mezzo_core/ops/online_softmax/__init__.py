"""Partial softmaxes over disjoint sets of keys, merged by their log-sum-exp (lse)."""

from mezzo_core.ops.online_softmax.api import merge as merge
from mezzo_core.ops.online_softmax.api import softmax_with_lse as softmax_with_lse
