import os

import torch

# Triton reads this when a kernel is defined: without a GPU, kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
