"""Settings of every test: without a GPU, kernels run in Triton's interpreter."""

import os

import torch

# Triton reads this when a kernel is defined, so it is set before any test is collected.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
