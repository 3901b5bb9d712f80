"""The figures of every report, and a sample text that a tiny model wrote."""

from collections.abc import Mapping
from pathlib import Path

import torch

from mezzo_core.data.tokenizers import load_tokenizer
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.nn.contract import MixerConfig
from mezzo_core.nn.generate import generate
from mezzo_core.papers import Figure, Sample
from mezzo_core.papers.figures import draw_bars, draw_curves, draw_lengths
from mezzo_core.reproduction.evidence import Trainings

PROMPT = "Elizabeth was "
LENGTHS = tuple(2**i for i in range(10, 19))


def training_figures(trainings: Trainings, folder: Path) -> list[Figure]:
    """Draw loss curves and perplexities into an existing folder, if there were trainings."""
    if not trainings.done:
        return []
    return [
        _curves(trainings, folder / "losses.png"),
        _bars(trainings, folder / "perplexities.png"),
    ]


def sample_text(trainings: Trainings, model: str, num_tokens: int) -> list[Sample]:
    """Let a model of the first seed continue PROMPT, if there were trainings."""
    if not trainings.done:
        return []
    run = trainings.seeds_of(model)[0]
    trained, _, extra = load_model(run.out / "model", device=torch.device("cpu"))
    tokenizer = load_tokenizer(extra["tokenizer"])
    (tokens,) = generate(
        trained,
        [tokenizer.encode(PROMPT)],
        max_new_tokens=num_tokens,
        temperature=0.8,
        stop_tokens=(tokenizer.eos_token,),
        seed=0,
    )
    title = f"{num_tokens} bytes by the tiny {model}, temperature 0.8, seed 0"
    return [Sample(title, PROMPT, tokenizer.decode(tokens))]


def _curves(trainings: Trainings, path: Path) -> Figure:
    curves = {model: trainings.seeds_of(model)[0].curve for model in trainings.models}
    smooth = max(1, trainings.budget.steps // 20)
    draw_curves(curves, path, xlabel="step", ylabel="training loss (nats a byte)", smooth=smooth)
    return Figure(
        path,
        "Training losses of the tiny models",
        f"Training loss by step, mean over {smooth} steps, seed {trainings.budget.seeds[0]}; every "
        "model reads the same bytes in the same order.",
    )


def _bars(trainings: Trainings, path: Path) -> Figure:
    values = {
        model: [run.perplexity for run in trainings.seeds_of(model)] for model in trainings.models
    }
    draw_bars(values, path, ylabel="validation perplexity a byte")
    return Figure(
        path,
        "Validation perplexity of the tiny models",
        f"Mean over {len(trainings.budget.seeds)} seed(s), whiskers from lowest to highest; the "
        "axis does not start at zero.",
    )


def layer_costs(mixers: Mapping[str, MixerConfig], d_model: int, path: Path, sizes: str) -> Figure:
    """Draw the FLOPs and the state bytes of one layer at each of LENGTHS, by the mixer's formulas.

    Args:
        mixers: mixer configurations by the paper's names.
        d_model: C.
        path: file of the figure.
        sizes: the sizes (C and others) in words.
    """
    flops, state = {}, {}
    for name, config in mixers.items():
        with torch.device("meta"):
            mixer = config.build(d_model).bfloat16()
        flops[name] = [(T, mixer.flops_per_token(T) / 1e6) for T in LENGTHS]
        state[name] = [(T, mixer.state_bytes(T) / 2**20) for T in LENGTHS]
    draw_lengths({"forward MFLOPs a token": flops, "state (MiB a sequence)": state}, path)
    return Figure(
        path,
        "What one layer costs",
        "FLOPs a token and size of the state of one mixer against the length T, computed for "
        f"{sizes}.",
    )
