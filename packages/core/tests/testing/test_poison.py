import pytest
import torch
from mezzo_core.testing.poison import poisoned


def fresh_buffers():
    like = torch.zeros(3, dtype=torch.bfloat16)
    return {
        "empty": torch.empty(2, 3),
        "empty_like": torch.empty_like(like),
        "empty_strided": torch.empty_strided((2, 2), (1, 2)),
        "new_empty": like.new_empty(4),
        "new_empty_strided": like.new_empty_strided((2,), (1,)),
        "complex": torch.empty(2, dtype=torch.complex64),
    }


@pytest.mark.parametrize("name", fresh_buffers())
def test_fresh_memory_is_nan(name, poison_memory):
    assert fresh_buffers()[name].isnan().all()


def test_an_op_that_forgets_an_element_is_caught():
    def forgets_the_last(x):
        out = torch.empty_like(x)
        out[:-1] = x[:-1]
        return out

    with poisoned():
        assert forgets_the_last(torch.ones(4))[-1].isnan()


def test_integers_written_memory_and_gradients_are_left_alone(poison_memory):
    assert torch.empty(3, dtype=torch.int64).dtype == torch.int64
    assert torch.equal(torch.zeros(3), torch.tensor([0.0, 0.0, 0.0]))
    assert torch.empty(3, requires_grad=True).is_leaf
    assert torch.empty(3, device="meta").is_meta
    compiled = torch.compile(
        lambda x: torch.empty_like(x).fill_(1), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))


def test_the_patches_are_taken_back_after_an_error():
    before = (torch.empty, torch.Tensor.new_empty)
    with pytest.raises(RuntimeError, match="inside"), poisoned():
        raise RuntimeError("inside")
    assert (torch.empty, torch.Tensor.new_empty) == before
