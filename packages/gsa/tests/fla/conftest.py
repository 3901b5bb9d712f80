"""flash-linear-attention on a CPU: Triton's interpreter runs its kernels, without a tuning."""

import pytest


@pytest.fixture(scope="package", autouse=True)
def untuned_interpreter():
    """Take the first configuration of each kernel: a tuning would need a GPU's clock."""
    from triton.runtime.autotuner import Autotuner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Autotuner, "_bench", lambda *_args, **_more: [0.0, 0.0, 0.0])
        yield


@pytest.fixture(scope="package", autouse=True)
def abc_by_its_definition():
    """Let its ABC layers compute by its `naive_recurrent_abc`: the interpreter has no such loop."""
    naive = pytest.importorskip("fla.ops.abc.naive", reason="flash-linear-attention is missing")
    from fla.layers import abc

    def chunk_abc(q, k, v, s, initial_state=None, output_final_state=False):
        heads_first = (x.transpose(1, 2) for x in (q, k, v, s))
        out, after = naive.naive_recurrent_abc(
            *heads_first, initial_state=initial_state, output_final_state=output_final_state
        )
        return out.transpose(1, 2), after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(abc, "chunk_abc", chunk_abc)
        yield
