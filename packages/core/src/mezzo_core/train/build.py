"""What a configuration stands for, built: the data, the model, and what computes its loss."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mezzo_core.data import BatchSource, DataConfig
from mezzo_core.errors import UserError
from mezzo_core.nn.checkpoint import copy_weights
from mezzo_core.nn.lm import LM
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.distributed import World, shard

LossFunction = Callable[..., Tensor]
"""`LM.loss`, or its compiled form."""


def micro_batches(config: TrainConfig, world: World) -> int:
    """Return into how many parts a process cuts its share of a batch.

    Raises:
        UserError: if the batch does not divide into whole micro batches.
    """
    share, left = divmod(config.batch_size, world.size)
    if left:
        raise UserError(
            f"batch_size = {config.batch_size} must be a multiple of the {world.size} processes"
        )
    parts, left = divmod(share, config.micro_batch_size or share)
    if left:
        raise UserError(
            f"micro_batch_size = {config.micro_batch_size} must divide a process's share of the "
            f"batch, {config.batch_size} / {world.size} = {share}"
        )
    return parts


def build_data(config: TrainConfig, out: Path, world: World) -> BatchSource:
    """Open the data; the first process packs it, and the others find it packed.

    Raises:
        UserError: if it cannot be read, or its tokenizer has more tokens than the model.
    """

    def build() -> BatchSource:
        return config.data.build(
            config.seq_len, out / "packed", rank=world.rank, world_size=world.size
        )

    built: list[BatchSource] = []
    world.first_only(lambda: built.append(build()))
    data = built[0] if built else build()
    if data.vocab_size > config.model.vocab_size:
        what: object = config.data
        if isinstance(config.data, DataConfig):
            what = f"the tokenizer {config.data.tokenizer!r}"
        raise UserError(
            f"{what} has {data.vocab_size} tokens, more than the model's vocab_size = "
            f"{config.model.vocab_size}"
        )
    return data


def build_model(
    config: TrainConfig, world: World, *, resumes: bool = False
) -> tuple[LM, LossFunction]:
    """Build the model, sharded if there are several processes, and what computes its loss.

    The weights are drawn on the CPU from the configuration's seed: neither the device nor the
    number of processes changes them. Those of `init_from` then take their place.

    Args:
        config: the run.
        world: its processes.
        resumes: whether a checkpoint's weights will replace these, so that `init_from` need not be
            there any more.

    Raises:
        UserError: if `init_from` has no weights of this model.
    """
    torch.manual_seed(config.seed)
    model = config.model.build()
    if config.init_from is not None and not resumes:
        copy_weights(config.init_from, model)
    if world.size == 1:
        model.to(world.device)
        # What is compiled is the bound method: the blocks, the head and the cross entropy in one.
        return model, torch.compile(model.loss) if config.compile else model.loss
    if config.compile:
        for unit in model.units():
            unit.compile()
    shard(model, model.units(), world, entries=("loss", "score"))
    return model, model.loss
