import pytest
import torch.utils._device
from mezzo_core.testing.poison import poison_memory as poison_memory

# torch keeps a set of its constructors from the first time that it needs one, and torch.compile may
# need it inside a test. Filled there it would hold the poisoned functions for good, and
# torch.device("meta") would no longer reach torch.empty in later tests.
torch.utils._device._device_constructors()


@pytest.fixture(autouse=True)
def _run_in_poisoned_memory(poison_memory: None) -> None:
    """Unwritten memory shows as NaN in every test of an op."""
