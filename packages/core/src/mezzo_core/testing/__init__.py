"""Helpers for the tests of all packages: comparisons, gradients, poisoned memory, properties."""

from mezzo_core.testing.numerics import assert_close as assert_close
from mezzo_core.testing.numerics import grads as grads
