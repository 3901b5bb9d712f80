"""The norm after a recurrence, with its gate."""

from mezzo_gsa.ops.norms.api import gated_norm as gated_norm
