"""Training, from a configuration to a model on disk: one loop, written to be read and copied."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from mezzo_core.config_json import to_json
from mezzo_core.data import NO_TARGET, Batch, BatchSource
from mezzo_core.data.batches import with_places
from mezzo_core.data.texts import TextConfig, absolute_tokenizer, change_texts, texts_of
from mezzo_core.device import autocast, move_batch
from mezzo_core.errors import FailedRunError, UserError
from mezzo_core.eval.evaluate import Evaluation, evaluate
from mezzo_core.nn.checkpoint import save_model
from mezzo_core.nn.lm import LM
from mezzo_core.nn.sharded import has_parts, is_part, whole_weights
from mezzo_core.train.build import (
    LossFunction,
    begin_data,
    build_data,
    build_model,
    describe,
    micro_batches,
    refused_later,
)
from mezzo_core.train.checkpoint import Checkpoints
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.context import own_parts, part_borders
from mezzo_core.train.distributed import World, backward, join_world
from mezzo_core.train.folder import check_corpus, check_folder, claim_folder, hold_folder, in_words
from mezzo_core.train.log import RunLog
from mezzo_core.train.meter import Meter, StepRow
from mezzo_core.train.optim import build_optimizer, learning_rate, set_rate
from mezzo_core.train.peaks import peak_speed
from mezzo_core.train.replay import Replayed
from mezzo_core.train.stopping import StoppedError, StopRequest, say_when_stuck, watch_signals

# A loss above this multiple of the uniform guess's loss, log(vocab), counts as exploded.
EXPLODED = 3.0


class DivergenceError(FailedRunError):
    """The loss or the gradient has become NaN or infinite, or the loss has exploded."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes:
        final_loss: training loss of the last step, in nats a token.
        val_loss: validation loss after the last step; None if it was not evaluated.
        val_perplexity: exp(val_loss).
        val_tokens: how many targets that was, by `eval_batches` maybe not all that are held out.
        val_accuracy: share of the validation targets that the model gave the highest logit.
        tokens_per_second: speed of all processes together, without evaluations and checkpoints.
        steps: optimizer steps done.
        out: the run's folder.
    """

    final_loss: float
    val_loss: float | None
    val_perplexity: float | None
    val_tokens: int | None
    val_accuracy: float | None
    tokens_per_second: float
    steps: int
    out: Path


@dataclass(frozen=True)
class _Run:
    """A run that is ready to train, from the start or from a checkpoint."""

    config: TrainConfig
    out: Path
    world: World
    checkpoints: Checkpoints
    stop: StopRequest
    data: BatchSource
    model: LM
    loss_function: LossFunction
    optimizer: torch.optim.Optimizer
    parts: Callable[[Batch], Iterator[Batch]]
    done: int


def train(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = True,
    new_data: bool = False,
    on_step: Callable[[StepRow], None] | None = None,
    quiet: bool = False,
    device: str | torch.device | None = None,
) -> TrainResult:
    """Train a model, alone or as one of torchrun's processes.

    The folder `out` gets config.json, log.jsonl (log.csv at the end), loss.png, checkpoints/step-N
    and model/, which `mezzo_core.nn.checkpoint.load_model` reads. If a run is killed, at whatever
    moment, the same call continues it from its newest complete checkpoint. On a CPU the losses are
    then bit for bit those of an uninterrupted run. After Ctrl-C, SIGTERM or SIGHUP the run finishes
    its step, saves a checkpoint and ends; a second one (but SIGHUP) ends it at once.

    Args:
        config: configuration of the run.
        out: folder of the run, created if needed; only one run at a time can use it.
        resume: continue the run in `out`, if there is one; False removes it and starts over.
        new_data: continue even if the data has changed since the run began.
        on_step: called with every step's row of the log, in every process, in order.
        quiet: show no progress; messages go to Python's logging.
        device: "cpu" or "cuda"; None takes a GPU if there is one.

    Raises:
        UserError: if the data, the folder or the device cannot be used; if `out` holds a run of
            another configuration or on other data; or if the disk is full, in which case the last
            checkpoint is intact.
        DivergenceError: if the loss explodes, or becomes NaN or infinite.
        StoppedError: (a KeyboardInterrupt) after Ctrl-C, SIGTERM or SIGHUP.
    """
    out, joined = Path(out), join_world(device, config.context_parallel)
    with watch_signals() as stop, joined as world, ExitStack() as stack:

        def open_folder() -> None:
            check_folder(out, config, resume=resume, may_move=not new_data)
            stack.enter_context(hold_folder(out))

        world.first_only(open_folder)
        checkpoints = Checkpoints(out / "checkpoints", world, config.keep_checkpoints)
        with _explained(out, checkpoints, stop):
            run = _prepare(config, out, checkpoints, stop, resume=resume, new_data=new_data)
            with RunLog(out, config, done=run.done, active=world.is_first, quiet=quiet) as log:
                return _train(run, log, on_step)


def _prepare(
    config: TrainConfig,
    out: Path,
    checkpoints: Checkpoints,
    stop: StopRequest,
    *,
    resume: bool,
    new_data: bool,
) -> _Run:
    """Build everything that the run needs; if this fails, the folder's files are unchanged."""
    world = checkpoints.world
    parts = micro_batches(config, world)
    data = build_data(config, world)
    resumes = resume and checkpoints.newest() is not None
    model, loss_function = build_model(config, world, resumes=resumes)
    borders = part_borders(model, config.seq_len, world.context)
    cut = partial(own_parts, count=parts, world=world, borders=borders)
    optimizer = build_optimizer(model, config.optim, captured=config.cuda_graph)

    def check() -> None:
        if resumes and not new_data:
            check_corpus(out, config.data, data.fingerprint)

    world.first_only(check)
    resumed = checkpoints.load(model, optimizer) if resume else None
    place = None if resumed is None else resumed.data
    world.each(partial(begin_data, data, place, config.batch_size))
    stop.defer(again_is_urgent=world.size == 1)
    world.first_only(lambda: claim_folder(out, config, data.fingerprint, resume=resume))
    done = 0 if resumed is None else resumed.step
    return _Run(
        config, out, world, checkpoints, stop, data, model, loss_function, optimizer, cut, done
    )


def _train(run: _Run, log: RunLog, on_step: Callable[[StepRow], None] | None) -> TrainResult:
    config, done = run.config, run.done
    peak = peak_speed(config, run.model, run.world)
    meter = Meter(run.world, config.batch_size * config.seq_len, run.stop, peak)
    for note in (
        describe(config, run.model, run.world, run.done),
        *refused_later(config, run.model),
    ):
        log.note(note)
    end = done if _is_accurate(config, log, done) else max(done, config.steps)
    take_step: Callable[..., Sequence[Tensor]] = partial(_take_step, run)
    if config.cuda_graph:
        take_step = Replayed(take_step, run.world.device)
    for step in range(done, end):
        lr = learning_rate(config.optim, step, config.steps)
        set_rate(run.optimizer, lr)
        loss, grad_norm = take_step(*_read(run, step))
        meter.add(step + 1, lr, loss, grad_norm)

        is_last = step + 1 == config.steps
        evaluates = is_last or (step + 1) % config.eval_every == 0
        saves = is_last or (step + 1) % config.checkpoint_every == 0
        if not (meter.is_due or evaluates or saves):
            continue
        for row in meter.read():
            _refuse_divergence(row, run)
            log.step(row)
            if on_step is not None:
                on_step(row)
        with meter.paused():
            if evaluates:
                log.evaluation(step + 1, _evaluate(run, step + 1))
                if _is_accurate(config, log, step + 1):
                    end, is_last = step + 1, True
            if saves or is_last or meter.must_stop:
                if meter.must_stop:
                    run.stop.is_noticed.set()
                log.sync()
                run.checkpoints.save(step + 1, run.model, run.optimizer, run.data.state_dict())
                _save_model(run, step + 1)
                if meter.must_stop and not is_last:
                    raise _stopped(run, step + 1)
        if is_last:
            break
    if done >= end:  # a kill may have come between the last checkpoint and the model
        _save_model(run, done)
    log.plot()
    if run.stop.is_made:
        raise _stopped(run, end)
    return _result(log, meter, end, run.out)


def _is_accurate(config: TrainConfig, log: RunLog, step: int) -> bool:
    """Tell whether the evaluation after this step, if there was one, is enough to end the run."""
    if config.stop_at_accuracy is None or not log.rows or log.rows[-1]["step"] != step:
        return False
    found = log.rows[-1].get("val_accuracy")
    return found is not None and found > config.stop_at_accuracy


def _read(run: _Run, step: int) -> tuple[list[Batch], int | Tensor]:
    """Return this process's micro batches of a step, on its device, and the count of all targets.

    The mean is taken over the targets of the whole batch: every part's sum is divided by the same
    count. So the number of micro batches or processes changes neither the loss nor the gradient.
    """
    world, batch = run.world, run.data.train_batch(step, run.config.batch_size)
    count: int | Tensor = int((batch.targets != NO_TARGET).sum())
    if run.data.reads_shard:
        count = world.sum(torch.tensor(count, device=world.device)) // world.context
    else:
        batch = batch.part(world.share, world.num_shares)
    parts = [move_batch(part, world.device) for part in with_places([*run.parts(batch)])]
    if run.config.cuda_graph:  # for which a number would be a constant
        count = torch.stack([(part.targets != NO_TARGET).sum() for part in parts]).sum()
    # A batch without targets has loss 0, as by `LM.loss`, and not 0 / 0.
    return parts, count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def _take_step(run: _Run, parts: Sequence[Batch], count: int | Tensor) -> tuple[Tensor, Tensor]:
    """Change the weights by the batch; return our part of its mean loss, and the gradient's norm.

    With `cuda_graph` a graph captures this: so it may read only its arguments and tensors that stay
    where they are on the device, and must not wait for the device.
    """
    world = run.world
    total = torch.zeros((), device=world.device)
    for i, batch in enumerate(parts):
        with autocast(world.device, run.config.precision):
            loss = run.loss_function(*batch, reduction="sum") / count
        backward(loss, run.model, world, is_last=i + 1 == len(parts))
        total += loss.detach()
    grad_norm = clip_grad_norm_(run.model.parameters(), run.config.optim.clip)
    if is_part(grad_norm):
        grad_norm = grad_norm.full_tensor()
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return total, grad_norm


def _evaluate(run: _Run, step: int) -> Evaluation:
    """Evaluate the model on the validation part; each process takes its share of every batch."""
    config, world, data = run.config, run.world, run.data

    def our_parts() -> Iterator[Batch]:
        for batch in islice(data.validation_batches(config.batch_size), config.eval_batches):
            yield from run.parts(batch.part(world.share, world.num_shares))

    whole = config.eval_batches is None
    found = evaluate(
        run.model,
        our_parts(),
        num_bytes=data.num_validation_bytes if whole else None,
        precision=config.precision,
        add_up=world.sum,
        add_parts=world.sum_parts,
    )
    # The log can hold no infinity, and a loss whose perplexity overflows has exploded anyway.
    if not math.isfinite(found.perplexity):
        raise DivergenceError(
            f"the validation loss after step {step} is {found.loss}; "
            f"{run.checkpoints.describe_newest()}"
        )
    return found


def _save_model(run: _Run, step: int) -> None:
    """Write the trained model, whole, for `load_model`."""
    config, folder = run.config, run.out / "model"
    weights = whole_weights(run.model) if has_parts(run.model) else None
    data = config.data
    extra: dict[str, Any] = {"name": config.name, "step": step, "seq_len": config.seq_len}
    if isinstance(data, TextConfig) and run.data.tokenizer is not None:
        extra["tokenizer"] = absolute_tokenizer(texts_of(data)[0].tokenizer)
        data = change_texts(data, tokenizer=extra["tokenizer"])
        extra["tokenizer_identity"] = run.data.tokenizer.identity
        extra["fingerprint"] = run.data.fingerprint
    extra["data"] = to_json(data)
    run.world.first_only(
        lambda: save_model(run.model, config.model, folder, extra, weights=weights)
    )


def _refuse_divergence(row: StepRow, run: _Run) -> None:
    config = run.config
    limit = EXPLODED * math.log(config.model.vocab_size)
    if row["loss"] <= limit and math.isfinite(row["grad_norm"]):  # NaN compares as False
        return
    first = (row["step"] - 1) * config.batch_size
    place = f"windows {first} to {first + config.batch_size - 1} of the order of training"
    if run.data.num_train_tokens is not None:
        epoch = first * config.seq_len // run.data.num_train_tokens
        place += f", in epoch {epoch + 1}"
    raise DivergenceError(
        f"training diverged at step {row['step']} ({place}): loss {row['loss']:.4g}, gradient norm "
        f"{row['grad_norm']:.4g}; {run.checkpoints.describe_newest()}; "
        f"start over (train --fresh) with a lower lr than {config.optim.lr:g} or a longer warm-up"
    )


def _stopped(run: _Run, step: int) -> StoppedError:
    left = f"after step {step} of {run.config.steps}; {run.checkpoints.describe_newest()}"
    on = "; the same command goes on from there" if step < run.config.steps else ""
    return run.stop.error(left + on)


def _result(log: RunLog, meter: Meter, steps: int, out: Path) -> TrainResult:
    trained = [row for row in log.rows if "loss" in row]
    evaluated = [row for row in log.rows if "val_loss" in row and row["step"] == steps]
    found = evaluated[-1] if evaluated else {}
    last = trained[-1] if trained else {"loss": math.nan, "tokens_per_second": 0.0}
    return TrainResult(
        final_loss=last["loss"],
        val_loss=found.get("val_loss"),
        val_perplexity=found.get("val_perplexity"),
        val_tokens=found.get("val_tokens"),
        val_accuracy=found.get("val_accuracy"),
        tokens_per_second=meter.tokens_per_second or last["tokens_per_second"],
        steps=steps,
        out=out,
    )


@contextmanager
def _explained(out: Path, checkpoints: Checkpoints, stop: StopRequest) -> Iterator[None]:
    """Turn the error that ends a run into one line that says where the run can be resumed."""
    several = checkpoints.world.size > 1

    def stuck() -> str:
        return (
            f"the run in {out} was asked to stop and its step does not end, perhaps because "
            f"another process was lost; {checkpoints.describe_newest()}"
        )

    try:
        with say_when_stuck(stop, stuck) if several else nullcontext():
            yield
    except (Exception, StoppedError) as error:
        if stop.is_urgent:  # libraries may have turned the interruption into another error
            raise stop.error(f"at once; {checkpoints.describe_newest()}") from None
        if isinstance(error, OSError):
            raise UserError(
                f"the run in {out} cannot go on: {in_words(error)}; {checkpoints.describe_newest()}"
            ) from error
        if several and _is_loss(error):
            raise UserError(
                f"another process of the run in {out} was lost; {checkpoints.describe_newest()}"
            ) from error
        raise


def _is_loss(error: BaseException) -> bool:
    """Tell whether the error means that another process was lost while this one waited for it."""
    words = str(error).lower()
    is_spoken = any(word in words for word in ("peer", "broken pipe", "gloo", "nccl"))
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and is_spoken)
