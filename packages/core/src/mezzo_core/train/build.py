"""Builds a run from its configuration: the data, the model and the function of its loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezzo_core.config_json import from_json, to_json
from mezzo_core.data import BatchSource
from mezzo_core.data.texts import TextConfig, texts_of
from mezzo_core.data.tokenized_corpus import token_store
from mezzo_core.errors import UserError
from mezzo_core.nn.checkpoint import copy_weights
from mezzo_core.nn.lm import LM
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.context import part_borders, share_sequence
from mezzo_core.train.distributed import World, shard

LossFunction = Callable[..., Tensor]
"""`LM.loss`, or its compiled form."""

COPY_BYTES = 16
"""Bytes of a whole copy for each parameter: weight, gradient and AdamW's two moments."""

SMALL = 50_000_000
"""A model with fewer parameters is compiled whole: its kernels are short, so that the host limits
its speed, and one graph takes the least of the host. But then each layer takes time to compile. A
larger model compiles each kind of unit once, for all its layers."""


def micro_batches(config: TrainConfig, world: World) -> int:
    """Return how many micro batches a process cuts its share of a batch into.

    Raises:
        UserError: if the batch cannot be divided evenly.
    """
    share, left = divmod(config.batch_size, world.num_shares)
    if left:
        shared = f" / context_parallel = {world.context}" if world.context > 1 else ""
        raise UserError(
            f"batch_size = {config.batch_size} must be a multiple of the {world.size} processes"
            f"{shared}"
        )
    parts, left = divmod(share, config.micro_batch_size or share)
    if left:
        raise UserError(
            f"micro_batch_size = {config.micro_batch_size} must divide a process's share of the "
            f"batch, {config.batch_size} / {world.num_shares} = {share}"
        )
    return parts


def build_data(config: TrainConfig, world: World) -> BatchSource:
    """Open the data; the first process tokenizes a corpus, and the others then read its tokens.

    Raises:
        UserError: if the data cannot be read, has no training part, or has more tokens than the
            model's vocabulary.
    """

    def build() -> BatchSource:
        return config.data.build(
            config.seq_len, token_store(), rank=world.share, world_size=world.num_shares
        )

    built: list[BatchSource] = []
    world.first_only(lambda: built.append(build()))
    data = built[0] if built else build()
    if data.num_train_tokens == 0:
        raise UserError("validation_fraction = 1 holds out all of the text: nothing to train on")
    if not data.reads_shard:
        data.check_training(config.batch_size)
    if data.vocab_size > config.model.vocab_size:
        what: object = config.data
        if isinstance(config.data, TextConfig):
            what = f"the tokenizer {texts_of(config.data)[0].tokenizer!r}"
        raise UserError(
            f"{what} has {data.vocab_size} tokens, more than the model's vocab_size = "
            f"{config.model.vocab_size}: --vocab-size {data.vocab_size} fits"
        )
    return data


def begin_data(data: BatchSource, place: dict[str, Any] | None, batch_size: int) -> None:
    """Go to a checkpoint's place in the data, if there is one, and see whether there is more.

    `build_data` has checked sources that every process reads whole.

    Raises:
        UserError: if the place is not there any more, or a process has no shard to train on.
    """
    if place is not None:
        data.load_state_dict(place)
    if data.reads_shard:
        data.check_training(batch_size)


def build_model(
    config: TrainConfig, world: World, *, resumes: bool = False
) -> tuple[LM, LossFunction]:
    """Build the model, sharded if it is to be, and the function of its loss.

    The initial weights are drawn on the CPU from the configuration's seed, so they depend neither
    on the device nor on the number of processes. With `init_from`, its weights replace them. A run
    that resumes does not read `init_from`, which may be gone: it gets a checkpoint's weights.

    Raises:
        UserError: if `init_from` has no weights of this model, or several processes are to replay
            CUDA graphs.
    """
    if config.cuda_graph and world.size > 1:
        raise UserError(f"cuda_graph is for one process, and there are {world.size}")
    torch.manual_seed(config.seed)
    model = config.model.build()
    if config.init_from is not None and not resumes:
        copy_weights(config.init_from, model)
    if config.activation_checkpointing:
        for unit in model.units():
            _recompute_in_backward(unit)
    # Where states come from another process, the graph breaks at each layer.
    large = model.num_parameters() >= SMALL or world.context > 1
    sharded = is_sharded(config, model, world)
    if config.compile and (sharded or large):
        for unit in model.units():  # those of one kind share one compiled graph
            unit.compile()
    if world.context > 1:
        if (reason := _keeps_no_state(model)) is not None:
            raise UserError(f"context_parallel passes states on, but {reason}")
        borders = part_borders(model, config.seq_len, world.context)
        share_sequence(model.stack, borders, world.group)
    if sharded:
        # All processes gather weights together. So one that waits for a state must first have
        # gathered all that the others gather until they send it.
        parts = model.stack.stages() if world.context > 1 else model.units()
        shard(model, parts, world)
    else:
        model.to(world.device)
    # Compiling the bound method gives one graph of the blocks, the head and the cross entropy. In a
    # sharded model it is several graphs, because weights are gathered between them.
    whole = config.compile and (sharded or not large)
    return model, torch.compile(model.loss) if whole else model.loss


def describe(config: TrainConfig, model: LM, world: World, done: int) -> str:
    """Return what runs, and where: device, precision, kernels, compilation, copies."""
    on_gpu = world.device.type == "cuda"
    where = str(world.device) if world.size == 1 else f"{world.size} x {world.device.type}"
    bf16 = config.precision == "bf16" or (config.precision == "auto" and on_gpu)
    words = [f"{model.num_parameters():,} parameters on {where} in {'bf16' if bf16 else 'fp32'}"]
    words.append("Triton kernels" if on_gpu else "ops in PyTorch (their kernels need a GPU)")
    sharded = is_sharded(config, model, world)
    if config.compile:
        small = model.num_parameters() < SMALL
        whole = sharded or (small and world.context == 1)
        reason = "each sequence is shared" if small else "50M parameters or more"
        words.append("compiled whole" if whole else f"compiled by layers ({reason})")
    if config.cuda_graph:
        words.append("steps as CUDA graphs" if on_gpu else "no CUDA graphs")
    if config.activation_checkpointing:
        words.append("activations computed twice")
    if world.size > 1:
        words.append("weights in parts (FSDP2)" if sharded else "a whole copy in each process")
    if world.context > 1:
        words.append(f"each sequence in {world.context} processes")
    return ", ".join(words) + (f"; resuming after step {done}" if done else "")


def refused_later(config: TrainConfig, model: LM) -> list[str]:
    """Return why `generate` will refuse the trained model, one line a reason; usually none."""
    reasons = []
    try:
        from_json(to_json(config.model))
    except UserError as error:
        reasons.append(f"generate and eval will refuse this model: {error}")
    if (reason := _keeps_no_state(model)) is not None:
        reasons.append(f"generate will refuse this model: {reason}")
    return reasons


def _keeps_no_state(model: LM) -> str | None:
    """Return why the model cannot go on from a state; None if it can."""
    weight, stack = next(model.parameters()), model.stack
    x = torch.zeros(1, 1, stack.d_model, device=weight.device, dtype=weight.dtype)
    try:
        with torch.no_grad():
            stack.check_step(x, stack.reserve(stack.init_state(1), 1))
    except ValueError as error:
        return str(error)
    return None


def _recompute_in_backward(unit: nn.Module) -> None:
    """Let the backward compute the unit's activations again, from its input, which alone is kept.

    The forward is replaced, not the module, so that weights keep their names, and what runs around
    a forward (FSDP gathers weights) does not run again.
    """
    whole = unit.forward

    # A function of our own: torch.compile of a unit begins at no function of torch's.
    def forward(*arguments: Any, **named: Any) -> Any:
        return checkpoint(whole, *arguments, use_reentrant=False, **named)

    unit.forward = forward


def is_sharded(config: TrainConfig, model: LM, world: World) -> bool:
    """Tell whether each process holds a part of the model; all processes give the same answer."""
    if world.size == 1 or config.shard is not None or world.device.type != "cuda":
        return world.size > 1 and bool(config.shard)
    memory = torch.cuda.get_device_properties(world.device).total_memory
    too_large = COPY_BYTES * model.num_parameters() > memory / 2
    return any(world.each(lambda: too_large))  # their GPUs may differ
