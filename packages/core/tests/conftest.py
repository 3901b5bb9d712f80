import pytest
import torch
from mezzo_core.testing.poison import poison_memory as poison_memory


@pytest.fixture(autouse=True)
def _ops_run_in_poisoned_memory(request: pytest.FixtureRequest) -> None:
    if "ops" in request.path.parts:
        request.getfixturevalue("poison_memory")


@pytest.fixture
def device() -> torch.device:
    """Where Triton kernels run here: on the GPU, or on the CPU in the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
