"""Checkpoints of several processes: any number reads them, and all do the same about a fault."""

import runpy
import shutil
from pathlib import Path

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.train.distributed import World

CHILD = runpy.run_path(str(Path(__file__).parent / "children" / "reshard.py"))


@pytest.mark.slow
def test_one_process_saves_two_read_and_save_and_one_reads(
    checkpoints, tiny, answers_of_processes, tmp_path
):
    """Weights of fewer rows than processes, of rows that do not divide, tied ones and buffers."""
    build, is_of = CHILD["build"], CHILD["is_of"]
    alone = World(torch.device("cpu"))
    checkpoints.save(1, *build(1, alone), {})
    found, errors = answers_of_processes("reshard", tiny(), checkpoints.folder, size=2)
    full = (
        f"cannot save the checkpoint of step 4 in {checkpoints.folder} (No space left on device); "
        f"the last checkpoint is {checkpoints.folder / 'step-2'}"
    )
    wanted = {
        "first step": 1,
        "first weights": True,
        "step after damage": 2,
        "weights after damage": True,
        "message": full,
    }
    assert found == [wanted, wanted]
    warnings = [[line for line in error.splitlines() if "damaged" in line] for error in errors]
    assert [len(lines) for lines in warnings] == [1, 0]
    assert "process-1.safetensors" in warnings[0][0]
    names = sorted(path.name for path in checkpoints.folder.iterdir())
    assert names == ["step-1", "step-2", "step-3"]

    model, optimizer = build(5, alone)
    CHILD["flip_last_byte"](checkpoints.folder / "step-3")
    with pytest.raises(UserError, match=r"saved by 2 processes .* resume with as many, not 1"):
        checkpoints.load(model, optimizer)
    shutil.rmtree(checkpoints.folder / "step-3")
    assert checkpoints.load(model, optimizer).step == 2
    assert is_of(2, model, optimizer)
