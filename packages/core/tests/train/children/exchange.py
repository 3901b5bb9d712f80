"""Compute one gradient in two micro batches, as one of several processes: CONFIG STAGES.

Prints JSON. STAGES of processes that share a sequence are "blocks" or, as of a DRT, the "stack".

For copies and for a sharded model it prints how many exchanges of gradients each micro batch made,
and how far the gradient is from the one that this process computes alone, eagerly.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from mezzo_core.config_json import from_json
from mezzo_core.data import Batch
from mezzo_core.nn.contract import AbstractStack
from mezzo_core.nn.stack import Stack
from mezzo_core.train.build import build_model
from mezzo_core.train.context import part_borders, sequence_part
from mezzo_core.train.distributed import World, backward, join_world
from torch.profiler import profile

PARTS = 2


def gradients(model):
    """Return the gradient of each trained weight, whole."""
    found = (weight.grad for weight in model.parameters() if weight.requires_grad)
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in found]


def build(config, world):
    """Build a model; where sequences are shared, its embedding is not trained."""
    model, loss = build_model(config, world)
    model.embed.requires_grad_(config.context_parallel == 1)
    return model, loss


def main(config):
    alone = World(torch.device("cpu"))
    tokens = torch.randint(
        config.model.vocab_size, (4, 17), generator=torch.Generator().manual_seed(0)
    )
    plain = replace(config, compile=False, activation_checkpointing=False)
    model, loss = build(plain, alone)
    backward(loss(tokens[:, :-1], tokens[:, 1:], reduction="sum"), model, alone, is_last=True)
    wanted = gradients(model)
    found = {}
    with join_world("cpu", config.context_parallel) as world:
        ours = tokens.chunk(world.num_shares)[world.share]
        for shard in (False, True):
            model, loss = build(replace(config, shard=shard, seq_len=16), world)
            exchanges = []
            for i, part in enumerate(ours.chunk(PARTS)):
                whole = Batch(part[:, :-1], part[:, 1:])
                borders = part_borders(model, 16, world.context)
                batch = sequence_part(whole, borders, world.rank % world.context)
                value = loss(*batch, reduction="sum")
                with profile() as seen:
                    backward(value, model, world, is_last=i + 1 == PARTS)
                names = [event.name for event in seen.events()]
                exchanges.append(sum("c10d::" in name and "reduce" in name for name in names))
            errors = [
                float((a - b).norm() / b.norm())
                for a, b in zip(gradients(model), wanted, strict=True)
            ]
            found[str(shard)] = {"exchanges": exchanges, "error": max(errors)}
    sys.stdout.write(json.dumps(found))


if sys.argv[2] == "stack":
    Stack.stages = AbstractStack.stages
torch.compile = partial(torch.compile, backend="aot_eager")  # which needs no compiler
main(from_json(json.loads(Path(sys.argv[1]).read_text())))
