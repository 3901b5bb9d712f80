"""Save and load checkpoints as one of several processes: CONFIG FOLDER; prints what it found.

The weights of seed 1 are in FOLDER. Those of seed 2 are saved as step 2, those of seed 3 as step 3,
whose last process's file is then damaged; saving step 4 fails in that process alone.
"""

import errno
import json
import os
import sys
from pathlib import Path

import torch
from mezzo_core.errors import UserError
from mezzo_core.train.checkpoint import Checkpoints
from mezzo_core.train.distributed import join_world, shard
from torch import nn

LAST = 1


class Odd(nn.Module):
    """Weights of 5, 3 and 1 rows, a tied one, buffers with and without dimensions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.parts = nn.ModuleList([nn.Linear(2, 5), nn.Linear(5, 1)])
        self.embed = nn.Embedding(3, 4)
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("places", torch.randn(7))
        self.register_buffer("scalar", torch.randn(()))


def build(seed, world):
    """Return a sharded model and an optimizer whose moments are twice and thrice the weights."""
    model = Odd(seed)
    shard(model, model.parts, world)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {"exp_avg": parameter.detach() * 2, "exp_avg_sq": parameter.detach() * 3}
        optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
    return model, optimizer


def is_of(seed, model, optimizer):
    """Tell whether a model and its moments are those of a seed, whole."""
    wanted = Odd(seed)
    pairs = [
        (parameter, times * weight)
        for mine, weight in zip(model.parameters(), wanted.parameters(), strict=True)
        for times, parameter in (
            (1, mine),
            (2, optimizer.state[mine]["exp_avg"]),
            (3, optimizer.state[mine]["exp_avg_sq"]),
        )
    ]
    pairs += zip(model.buffers(), wanted.buffers(), strict=True)
    return all(
        torch.equal(found.full_tensor() if hasattr(found, "full_tensor") else found, weight)
        for found, weight in pairs
    )


def flip_last_byte(folder):
    """Damage the last process's shard; a second time mends it."""
    path = folder / "state" / f"process-{LAST}.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def full(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def main(folder):
    found = {}
    with join_world("cpu") as world:
        checkpoints = Checkpoints(folder, world, keep=3)
        model, optimizer = build(5, world)
        found["first step"] = checkpoints.load(model, optimizer).step
        found["first weights"] = is_of(1, model, optimizer)
        checkpoints.save(2, *build(2, world), {})
        checkpoints.save(3, *build(3, world), {"place": world.rank})
        if world.rank == LAST:
            flip_last_byte(folder / "step-3")
        world.barrier()
        found["step after damage"] = checkpoints.load(model, optimizer).step
        found["weights after damage"] = is_of(2, model, optimizer)
        if world.rank == LAST:
            os.fsync = full
        try:
            checkpoints.save(4, model, optimizer, {})
        except UserError as error:
            found["message"] = str(error)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[2]))
