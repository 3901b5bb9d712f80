"""Compute gradients of models whose sequences processes share: FILE DEVICE; prints JSON.

For each model of the file, by its name, it prints how far the loss and the gradients, summed over
all processes, are from those that this process computes alone, in float32 and float64; and the
bytes of states that it sends for rows of 48 and of 96 tokens. Of a model whose name begins with
"frozen", the embedding and the first block are not trained.
"""

import json
import sys
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from mezzo_core.config_json import from_json
from mezzo_core.data import Batch
from mezzo_core.train.context import part_borders, sequence_part, share_sequence
from mezzo_core.train.distributed import join_world


def gradients(model, batch):
    """Return the summed loss, then the gradient of each weight that is trained."""
    loss = model.loss(*batch, reduction="sum")
    loss.backward()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
    return [loss.detach(), *grads]


def random_batch(vocab_size, num_tokens, device):
    tokens = torch.randint(vocab_size, (2, num_tokens + 1)).to(device)
    return Batch(tokens[:, :-1], tokens[:, 1:])


def error(config, dtype, world, is_frozen):
    """Return the largest relative error of the loss and the gradients."""
    torch.manual_seed(0)
    alone = config.build().to(world.device, dtype).eval()  # in training, DRT explores by noise
    if is_frozen:
        alone.embed.requires_grad_(False)
        alone.stack.blocks[0].requires_grad_(False)
    shared, batch = deepcopy(alone), random_batch(config.vocab_size, 48, world.device)
    borders = part_borders(shared, 48, world.size)
    share_sequence(shared.stack, borders)
    ours = gradients(shared, sequence_part(batch, borders, world.rank))
    for part in ours:
        dist.all_reduce(part)
    pairs = zip(ours, gradients(alone, batch), strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)


def sent_bytes(config, num_tokens, world):
    """Return how many bytes of states this process sends in a forward."""
    model, sent, isend = config.build().to(world.device), [], dist.isend

    def counted(tensor, **where):
        sent.append(tensor.nbytes)
        return isend(tensor, **where)

    borders = part_borders(model, num_tokens, world.size)
    share_sequence(model.stack, borders)
    dist.isend = counted
    with torch.no_grad():
        batch = random_batch(config.vocab_size, num_tokens, world.device)
        model.loss(*sequence_part(batch, borders, world.rank))
    dist.isend = isend
    return sum(sent)


def main(models, device):
    found = {}
    with join_world(device) as world:
        for name, config in models.items():
            is_frozen = name.startswith("frozen")
            found[name] = {
                "float32": error(config, torch.float32, world, is_frozen),
                "float64": error(config, torch.float64, world, is_frozen),
                "bytes": [sent_bytes(config, num_tokens, world) for num_tokens in (48, 96)],
            }
        world.barrier()  # what the first has sent, the others may not have yet
    sys.stdout.write(json.dumps(found))


told = json.loads(Path(sys.argv[1]).read_text())
main({name: from_json(model) for name, model in told.items()}, sys.argv[2])
