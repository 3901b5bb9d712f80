"""The report's figures, from what was measured, and the sample of generated text."""

from pathlib import Path

from mezzo_core.papers import Figure, Sample
from mezzo_core.papers.figures import draw_lengths
from mezzo_core.reproduction.figures import layer_costs, sample_text, training_figures

from mezzo_rat.bench import mixers
from mezzo_rat.reproduction.evidence import Evidence


def draw_figures(evidence: Evidence, folder: Path) -> list[Figure]:
    """Draw the figures for which this run has measurements, into an existing folder."""
    figures = [
        *training_figures(evidence.trainings, folder),
        layer_costs(
            mixers(head_dim=128),
            2048,
            folder / "costs.png",
            "C = 2048, D = 128, bfloat16 state",
        ),
    ]
    if evidence.timed:
        figures.append(_times(evidence, folder))
    return figures


def write_sample(evidence: Evidence) -> list[Sample]:
    """Let the RAT(L=16) model of the first seed continue a text, if it was trained."""
    return sample_text(evidence.trainings, "RAT(L=16)", evidence.scale.sample_tokens)


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
