import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where Triton kernels run here: on the GPU, or on the CPU in the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
