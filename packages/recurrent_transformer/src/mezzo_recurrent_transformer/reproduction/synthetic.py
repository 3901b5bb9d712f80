"""A sweep over tasks, models and seeds; the defaults are the protocol of the paper's appendix."""

import math
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from mezzo_core.config_json import check_fields, check_rules, differences
from mezzo_core.device import choose_device
from mezzo_core.errors import UserError, nearest
from mezzo_core.nn import BlocksConfig, LMConfig, StackConfig
from mezzo_core.reproduction import Cell, Header, Result
from mezzo_core.reproduction.runner import Job, fill
from mezzo_core.reproduction.training import Tuning
from mezzo_core.train.config import OptimConfig, Precision, TrainConfig

from mezzo_recurrent_transformer.block import RecurrentBlockConfig
from mezzo_recurrent_transformer.layer import LayerConfig
from mezzo_recurrent_transformer.stack import scaled
from mezzo_recurrent_transformer.synthetic.autoencoder import AutoEncoderConfig
from mezzo_recurrent_transformer.synthetic.memory import CompressionConfig
from mezzo_recurrent_transformer.synthetic.task import AbstractTask
from mezzo_recurrent_transformer.synthetic.tasks import TASKS
from mezzo_recurrent_transformer.transformer import TransformerBlockConfig

HEAD_DIM = 8
"""Width of a head: the paper has 16 at width 128."""
NORM_EPS = 1e-5
SOLVED = 1 - 1e-6
"""An accuracy above this has no mistake: test rows have fewer than a million targets."""
EVALUATIONS = 20
"""Of a run; those before the last one find a task that is solved."""
LAYERS: dict[str, type[LayerConfig]] = {
    "transformer": TransformerBlockConfig,
    "recurrent": RecurrentBlockConfig,
}
NAMES = {"transformer": "Transformer", "recurrent": "Recurrent Transformer"}
"""The names in the result."""
EXACT, BY_TOKEN = "exact match", "token accuracy"
PROTOCOL = (
    "MAD's six tasks in their baseline setting and copying, one layer of width 128 with MLP 512, "
    "16 heads and ALiBi, head not tied to the embedding, weights of the layer as the released code "
    "starts them; MAD's rows (12,800, memorization 256; "
    "1,280 test rows), batch 128, 200 epochs, or fewer once no test row has a mistake; AdamW with "
    "betas 0.9 and 0.98, cosine to 1e-6, neither warm-up nor clipping, the best of lr 1e-3, 5e-4, "
    "1e-4 by decay 0, 0.1, by exact match and then by token accuracy; bf16 on a GPU. "
    "Our reading of what the paper leaves open: compression is told from the last token through "
    "MAD's decoder; strings to copy have 5 to 20 letters, in training and in the test. Unlike "
    "MAD: the rate falls by step, only matrices decay, every target has the same weight"
)
"""What the defaults are, for a result's setting."""


@dataclass(frozen=True)
class SweepConfig:
    """What is swept over, and what all runs share.

    Raises:
        UserError: if a model is unknown, there is nothing to do, or the rows do not fill a batch.
    """

    tasks: tuple[AbstractTask, ...] = tuple(TASKS.values())  # their seeds are replaced
    models: tuple[str, ...] = tuple(LAYERS)
    learning_rates: tuple[float, ...] = (1e-3, 5e-4, 1e-4)  # in order, until one solves the task
    weight_decays: tuple[float, ...] = (0.0, 0.1)  # tried with each learning rate
    seeds: tuple[int, ...] = (0, 1, 2)  # of the weights and of the order of always the same rows
    d_model: int = 128  # C; the MLP has 4C, heads have 8
    batch_size: int = 128
    epochs: int = 200
    max_steps: int | None = None  # of a run, if its epochs have more
    precision: Precision = "auto"
    compile: bool = False
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for model in self.models:
            if model not in LAYERS:
                raise UserError(f"no model is named {model!r}{nearest(model, LAYERS)}")
        fewest = min((task.train_rows for task in self.tasks), default=0)
        least, rates, decays = OptimConfig().min_lr, self.learning_rates, self.weight_decays
        goes = all(least <= lr < math.inf for lr in rates)
        rules = {
            "tasks": (len(self.tasks) > 0, "one or more"),
            "models": (len(self.models) > 0, "one or more"),
            "learning_rates": (len(rates) > 0 and goes, f"one or more from {least:g} on"),
            "weight_decays": (
                len(decays) > 0 and all(0 <= decay < math.inf for decay in decays),
                "one or more from 0 on",
            ),
            "seeds": (len(self.seeds) > 0 and min(self.seeds) >= 0, "one or more from 0 on"),
            "d_model": (self.d_model % HEAD_DIM == 0 < self.d_model, f"a multiple of {HEAD_DIM}"),
            "batch_size": (1 <= self.batch_size <= fewest, f"from 1 to train_rows = {fewest}"),
            "epochs": (self.epochs >= 1, "at least 1"),
            "max_steps": (self.max_steps is None or self.max_steps >= 1, "at least 1 (or None)"),
        }
        check_rules(self, rules)

    def run(
        self, model: str, task: AbstractTask, lr: float, decay: float, seed: int
    ) -> TrainConfig:
        """Return one training of one layer."""
        steps = self.epochs * (task.train_rows // self.batch_size)
        steps = min(steps, self.max_steps or steps)
        every = max(1, steps // EVALUATIONS)
        return TrainConfig(
            name=f"{task.name} {model} lr {lr:g} decay {decay:g}",
            model=LMConfig(
                task.vocab_size,
                self.d_model,
                norm_eps=NORM_EPS,
                tie_embeddings=False,
                stack=self._stack(model, task),
            ),
            data=replace(task, seed=seed),
            optim=OptimConfig(
                lr, warmup_fraction=0.0, betas=(0.9, 0.98), weight_decay=decay, clip=math.inf
            ),
            seq_len=task.num_tokens,
            batch_size=self.batch_size,
            steps=steps,
            seed=seed,
            eval_every=every,
            stop_at_accuracy=SOLVED,
            checkpoint_every=every,
            keep_checkpoints=1,
            precision=self.precision,
            compile=self.compile,
            cuda_graph=self.cuda_graph,
        )

    def _stack(self, model: str, task: AbstractTask) -> StackConfig:
        # One layer has no residuals to scale.
        (layer,) = scaled(LAYERS[model](HEAD_DIM, 4 * self.d_model, norm_eps=NORM_EPS), 1, "init")
        if isinstance(task, CompressionConfig):
            return AutoEncoderConfig(layer, NORM_EPS)
        return BlocksConfig((layer,))

    def header(self) -> Header:
        """Return the head of the result: the protocol, and what is not as there."""
        changes = differences(self, SweepConfig(), ("tasks", "models", "compile", "cuda_graph"))
        changes += [
            f"{task.name}: {change}"
            for task in self.tasks
            for change in differences(task, TASKS[task.name], ("seed",))
        ]
        is_whole = not changes and len(self.tasks) == len(TASKS)
        return Header(
            kind="recall",
            title="Figure synth: MAD's tasks and copying, one layer",
            setting=PROTOCOL + (f". Here: {'; '.join(changes)}" if changes else ""),
            how="the paper's setting" if is_whole else "scaled down",
            columns=tuple(task.name for task in self.tasks),
            models=tuple(NAMES.values()),  # also those that another call trains
            unit="share",
            better="higher",
            groups=(EXACT, BY_TOKEN),
        )


def sweep(config: SweepConfig, out: Path, *, device: str | None = None, jobs: int = 1) -> Result:
    """Train everything that `config` asks for, one seed after another, so many jobs at a time.

    For each model, task and seed the result gets the exact match of the run where it is best, with
    details of all runs, and the token accuracy of this run. A sweep over the other model goes on in
    the same file, and so does one that was killed, see `Tuning`.

    Raises:
        UserError: if `out` has the result of another sweep or cannot be written, or there is no
            such device.
    """
    wanted = product(config.seeds, config.tasks, config.models)
    every = [_job(config, *each, out / "synthetic") for each in wanted]
    path, chosen = out / "synthetic.json", choose_device(device, None)
    return fill(path, vars(config.header()), every, out, chosen, processes=jobs)


def _job(config: SweepConfig, seed: int, task: AbstractTask, model: str, folder: Path) -> Job:
    """Return the job that trains one model with every setting of the optimizer."""
    optims = product(config.learning_rates, config.weight_decays)
    cells = tuple(Cell(NAMES[model], task.name, group, seed) for group in (EXACT, BY_TOKEN))
    work = Tuning(
        f"{task.name} {model} seed {seed}",
        cells,
        [config.run(model, task, lr, decay, seed) for lr, decay in optims],
        folder / f"{task.name}_{model}_seed{seed}",
        swept=("lr", "weight_decay"),
        by=("exact_match", "accuracy"),
        enough=SOLVED,
    )
    return Job(cells, work)
