import pytest
from mezzo_core.testing.poison import poison_memory as poison_memory


@pytest.fixture(autouse=True)
def _run_in_poisoned_memory(poison_memory: None) -> None:
    """Unwritten memory shows as NaN in every test of an op."""
