"""Settings of every test: without a GPU, kernels run in Triton's interpreter."""

import os
from importlib.util import find_spec

import torch
from mezzo_core.testing.interpreter import repair_interpreter

# Triton reads this when a kernel is defined, so it is set before any test is collected.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    repair_interpreter()
