"""flash-linear-attention on a CPU: Triton's interpreter runs its kernels, without a tuning."""

import pytest


@pytest.fixture(scope="package", autouse=True)
def untuned_interpreter():
    """Take the first configuration of each kernel: a tuning would need a GPU's clock."""
    from triton.runtime.autotuner import Autotuner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Autotuner, "_bench", lambda *_args, **_more: [0.0, 0.0, 0.0])
        yield
