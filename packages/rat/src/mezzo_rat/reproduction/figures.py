"""The report's figures, from what was measured, and the sample of generated text."""

from pathlib import Path

import torch
from mezzo_core.data.tokenizers import load_tokenizer
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.nn.generate import generate
from mezzo_core.papers import Figure, Sample
from mezzo_core.papers.figures import draw_bars, draw_curves, draw_lengths

from mezzo_rat.bench import mixers
from mezzo_rat.reproduction.evidence import Evidence
from mezzo_rat.reproduction.scale import RECIPES_OF_MODELS

PROMPT = "Elizabeth was "
PAPER_LENGTHS = tuple(2**i for i in range(10, 19))


def draw_figures(evidence: Evidence, folder: Path) -> list[Figure]:
    """Draw what the evidence at hand allows, into an existing folder."""
    figures = []
    if evidence.trained:
        figures += [_curves(evidence, folder), _perplexities(evidence, folder)]
    figures.append(_costs(folder))
    if evidence.timed:
        figures.append(_times(evidence, folder))
    return figures


def write_sample(evidence: Evidence) -> list[Sample]:
    """Let the RAT(L=16) model of the first seed continue a text, if it was trained."""
    if not evidence.trained:
        return []
    run = evidence.seeds_of("RAT(L=16)")[0]
    model, _, extra = load_model(run.out / "model", device="cpu")
    tokenizer = load_tokenizer(extra["tokenizer"])
    length = evidence.scale.sample_tokens
    (tokens,) = generate(
        model,
        [tokenizer.encode(PROMPT)],
        max_new_tokens=length,
        temperature=0.8,
        stop_tokens=(tokenizer.eos_token,),
        seed=0,
    )
    title = f"{length} bytes by the tiny RAT(L=16), temperature 0.8, seed 0"
    return [Sample(title, PROMPT, tokenizer.decode(tokens))]


def _curves(evidence: Evidence, folder: Path) -> Figure:
    path = folder / "losses.png"
    curves = {model: evidence.seeds_of(model)[0].curve for model in RECIPES_OF_MODELS}
    smooth = max(1, evidence.scale.steps // 20)
    draw_curves(curves, path, xlabel="step", ylabel="training loss (nats a byte)", smooth=smooth)
    return Figure(
        path,
        "Training losses of the tiny models",
        f"Training loss by step, mean over {smooth} steps, seed {evidence.scale.seeds[0]}; every "
        "model reads the same bytes in the same order.",
    )


def _perplexities(evidence: Evidence, folder: Path) -> Figure:
    path = folder / "perplexities.png"
    values = {
        model: [run.perplexity for run in evidence.seeds_of(model)] for model in RECIPES_OF_MODELS
    }
    draw_bars(values, path, ylabel="validation perplexity a byte")
    return Figure(
        path,
        "Validation perplexity of the tiny models",
        f"Mean over {len(evidence.scale.seeds)} seed(s), whiskers from lowest to highest; the axis "
        "does not start at zero.",
    )


def _costs(folder: Path) -> Figure:
    path = folder / "costs.png"
    d_model, head_dim = 2048, 128
    flops, state = {}, {}
    for name, config in mixers(head_dim).items():
        with torch.device("meta"):
            mixer = config.build(d_model).bfloat16()
        flops[name] = [(T, mixer.flops_per_token(T) / 1e6) for T in PAPER_LENGTHS]
        state[name] = [(T, mixer.state_bytes(T) / 2**20) for T in PAPER_LENGTHS]
    draw_lengths({"forward MFLOPs a token": flops, "state (MiB a sequence)": state}, path)
    return Figure(
        path,
        "What one layer costs",
        f"FLOPs a token and size of the state of one mixer against the length T, computed for "
        f"C = {d_model}, D = {head_dim}, bfloat16 state.",
    )


def _times(evidence: Evidence, folder: Path) -> Figure:
    path = folder / "times.png"
    panels = {}
    for phase, measurement in evidence.layers.items():
        panels[f"{phase} (ms)"] = {
            row.model: [
                (int(column), float(value))
                for column, value in zip(measurement.columns, row.values, strict=True)
            ]
            for row in measurement.rows
        }
    draw_lengths(panels, path)
    return Figure(
        path,
        "Time of one layer on this CPU",
        "Milliseconds for a training step, a prefill and one decoded token against the length T; "
        "the settings stand at Tables 6, 7 and 8.",
    )
