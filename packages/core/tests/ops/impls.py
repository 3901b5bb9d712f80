"""The implementations of core's ops that run here, and where they run."""

from importlib.util import find_spec

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NO_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton here")
impls = pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=NO_TRITON)])
