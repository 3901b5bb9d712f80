"""Training, from a configuration to a model on disk: one loop, written to be read and copied."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from mezzo_core.config_json import to_json
from mezzo_core.data import NO_TARGET, Batch, TextData
from mezzo_core.errors import UserError
from mezzo_core.eval.perplexity import Perplexity, perplexity
from mezzo_core.nn.checkpoint import save_model
from mezzo_core.nn.lm import LM
from mezzo_core.train.build import LossFunction, build_data, build_model, micro_batches
from mezzo_core.train.checkpoint import Checkpoints
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.device import autocast, move_batch
from mezzo_core.train.distributed import World, join_world
from mezzo_core.train.folder import claim_folder
from mezzo_core.train.log import RunLog
from mezzo_core.train.meter import Meter, StepRow
from mezzo_core.train.optim import build_optimizer, learning_rate

# A loss so many times that of guessing each token with the same probability has exploded.
EXPLODED = 3.0


class DivergenceError(UserError):
    """The loss or the gradient is no number any more, or the loss has exploded."""


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        final_loss: training loss of the last step, in nats a token.
        val_loss: validation loss after the last step; None if it was not evaluated.
        val_perplexity: exp of that.
        tokens_per_second: over all processes, evaluations and checkpoints left out.
        steps: optimizer steps done.
        out: the run's folder.
    """

    final_loss: float
    val_loss: float | None
    val_perplexity: float | None
    tokens_per_second: float
    steps: int
    out: Path


def train(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = True,
    on_step: Callable[[StepRow], None] | None = None,
    quiet: bool = False,
    device: str | torch.device | None = None,
) -> TrainResult:
    """Train a model, alone or as one of torchrun's processes.

    The folder `out` gets config.json, log.jsonl, loss.png, checkpoints/step-N and model/, which
    `mezzo_core.nn.checkpoint.load_model` reads. A run that was killed, at any moment, goes on from
    its newest complete checkpoint when it is called again; on a CPU its losses are then, bit for
    bit, those of a run that was never killed.

    Args:
        config: the run.
        out: its folder, made if needed.
        resume: go on with the run in `out`, if there is one; False removes it and starts over.
        on_step: called with every step's row of the log, in every process, in order.
        quiet: show nothing (lines go to Python's logging).
        device: "cpu" or "cuda"; None takes a GPU if there is one.

    Raises:
        UserError: if the data, the folder or the device cannot be used, `out` holds a run of
            another configuration, or the disk is full; the last checkpoint is intact.
        DivergenceError: if the loss explodes or is no number.
    """
    out = Path(out)
    with join_world(device) as world:
        world.first_only(lambda: claim_folder(out, config, resume))
        checkpoints = Checkpoints(out / "checkpoints", world, config.keep_checkpoints)
        with _explained(out, checkpoints):
            return _train(config, out, world, checkpoints, on_step, quiet)


def _train(
    config: TrainConfig,
    out: Path,
    world: World,
    checkpoints: Checkpoints,
    on_step: Callable[[StepRow], None] | None,
    quiet: bool,
) -> TrainResult:
    parts = micro_batches(config, world)
    data = build_data(config, out, world)
    resumes = checkpoints.newest() is not None
    model, loss_function = build_model(config, world, resumes=resumes)
    optimizer = build_optimizer(model, config.optim)
    resumed = checkpoints.load(model, optimizer)
    done = 0
    if resumed is not None:
        done = resumed.step
        data.load_state_dict(resumed.data)
    meter = Meter(world, config.batch_size * config.seq_len)

    with RunLog(out, config, done=done, active=world.is_first, quiet=quiet) as log:
        log.note(_describe(config, model, world, done))
        for step in range(done, config.steps):
            batch = data.train_batch(step, config.batch_size)
            loss = _backward(loss_function, batch, parts, data.reads_shard, config, world)
            grad_norm = clip_grad_norm_(model.parameters(), config.optim.clip)
            if isinstance(grad_norm, DTensor):
                grad_norm = grad_norm.full_tensor()
            lr = learning_rate(config.optim, step, config.steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            meter.add(step + 1, lr, loss, grad_norm)

            is_last = step + 1 == config.steps
            evaluates = is_last or (step + 1) % config.eval_every == 0
            saves = is_last or (step + 1) % config.checkpoint_every == 0
            if not (meter.is_due or evaluates or saves):
                continue
            for row in meter.read():
                _refuse_divergence(row, config, data, checkpoints)
                log.step(row)
                if on_step is not None:
                    on_step(row)
            with meter.paused():
                if evaluates:
                    found = _evaluate(model, data, config, world)
                    log.evaluation(step + 1, found)
                if saves:
                    log.sync()
                    checkpoints.save(step + 1, model, optimizer, data.state_dict())
                    _save_model(model, config, step + 1, out / "model", world)
        if done >= config.steps:  # a kill may have come between the last checkpoint and the model
            _save_model(model, config, done, out / "model", world)
        log.plot()
        return _result(log, meter, max(done, config.steps), out)


def _backward(
    loss_function: LossFunction,
    batch: Batch,
    parts: int,
    is_share: bool,
    config: TrainConfig,
    world: World,
) -> Tensor:
    """Add the gradient of the batch's mean loss to the parameters; return our part of that loss.

    The mean is over the targets of the whole batch, so that neither micro batches nor processes
    change the loss or the gradient: each part's sum is divided by the same count.
    """
    count: int | Tensor = int((batch.targets != NO_TARGET).sum())
    if is_share:
        count = world.sum(torch.tensor(count, device=world.device))
    else:
        batch = batch.part(world.rank, world.size)
    total = torch.zeros((), device=world.device)
    for i in range(parts):
        tokens, targets, borders = move_batch(batch.part(i, parts), world.device)
        with autocast(world.device, config.precision):
            loss = loss_function(tokens, targets, borders, reduction="sum") / count
        (loss * world.size).backward()  # FSDP averages gradients over processes
        total += loss.detach()
    return total


def _evaluate(model: LM, data: TextData, config: TrainConfig, world: World) -> Perplexity:
    """Measure perplexity on the validation part, each process on its share of every batch."""
    parts = micro_batches(config, world)

    def our_parts() -> Iterator[Batch]:
        for batch in islice(data.validation_batches(config.batch_size), config.eval_batches):
            ours = batch.part(world.rank, world.size)
            yield from (ours.part(i, parts) for i in range(parts))

    whole = config.eval_batches is None
    return perplexity(
        model,
        our_parts(),
        num_bytes=data.num_validation_bytes if whole else None,
        precision=config.precision,
        world=world,
    )


def _save_model(model: LM, config: TrainConfig, step: int, folder: Path, world: World) -> None:
    """Write the model for those who use it: whole, whatever the number of processes."""
    weights: dict[str, Any] | None = None
    if world.size > 1:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)
    extra = {
        "name": config.name,
        "step": step,
        "seq_len": config.seq_len,
        "tokenizer": config.data.tokenizer,
        "data": to_json(config.data),
    }
    world.first_only(lambda: save_model(model, config.model, folder, extra, weights=weights))


def _refuse_divergence(
    row: StepRow, config: TrainConfig, data: TextData, checkpoints: Checkpoints
) -> None:
    limit = EXPLODED * math.log(config.model.vocab_size)
    if row["loss"] <= limit and math.isfinite(row["grad_norm"]):  # NaN compares as False
        return
    first = (row["step"] - 1) * config.batch_size
    place = f"windows {first} to {first + config.batch_size - 1} of the order of training"
    if data.num_train_tokens is not None:
        epoch = first * config.seq_len // data.num_train_tokens
        place += f", in epoch {epoch + 1}"
    raise DivergenceError(
        f"training diverged at step {row['step']} ({place}): loss {row['loss']:.4g}, gradient norm "
        f"{row['grad_norm']:.4g}; {checkpoints.describe_newest()}; "
        f"a lower lr than {config.optim.lr:g} or a longer warm-up may help"
    )


def _describe(config: TrainConfig, model: LM, world: World, done: int) -> str:
    where = str(world.device) if world.size == 1 else f"{world.size} x {world.device.type}"
    start = f", resuming after step {done}" if done else ""
    return f"{model.num_parameters():,} parameters on {where}{start}"


def _result(log: RunLog, meter: Meter, steps: int, out: Path) -> TrainResult:
    trained = [row for row in log.rows if "loss" in row]
    evaluated = [row for row in log.rows if "val_loss" in row and row["step"] == steps]
    last = trained[-1] if trained else {"loss": math.nan, "tokens_per_second": 0.0}
    return TrainResult(
        final_loss=last["loss"],
        val_loss=evaluated[-1]["val_loss"] if evaluated else None,
        val_perplexity=evaluated[-1]["val_perplexity"] if evaluated else None,
        tokens_per_second=meter.tokens_per_second or last["tokens_per_second"],
        steps=steps,
        out=out,
    )


@contextmanager
def _explained(out: Path, checkpoints: Checkpoints) -> Iterator[None]:
    """Turn a full disk or a lost process into one line that says where the run can go on."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the run in {out} cannot go on: {error}; {checkpoints.describe_newest()}"
        ) from error
    except RuntimeError as error:
        is_lost = isinstance(error, dist.DistError) or "peer" in str(error).lower()
        if checkpoints.world.size == 1 or not is_lost:
            raise
        raise UserError(
            f"another process of the run in {out} was lost; {checkpoints.describe_newest()}"
        ) from error
