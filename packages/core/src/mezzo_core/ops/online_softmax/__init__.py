"""Merging softmaxes over parts of the keys into the softmax over all of them."""

from mezzo_core.ops.online_softmax.api import SoftmaxPart as SoftmaxPart
from mezzo_core.ops.online_softmax.api import merge_softmax as merge_softmax
