"""The loss of a language model's head, computed without holding all logits."""

from mezzo_core.ops.linear_cross_entropy.api import NO_TARGET as NO_TARGET
from mezzo_core.ops.linear_cross_entropy.api import CrossEntropy as CrossEntropy
from mezzo_core.ops.linear_cross_entropy.api import check_targets as check_targets
from mezzo_core.ops.linear_cross_entropy.api import linear_cross_entropy as linear_cross_entropy
from mezzo_core.ops.linear_cross_entropy.reference import cross_entropy as cross_entropy
