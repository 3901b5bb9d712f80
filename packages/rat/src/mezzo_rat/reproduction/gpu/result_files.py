"""The contents of each result file of the speed tables, and the claims that it answers."""

from mezzo_core.papers.cells import SpeedTable

from mezzo_rat.recipes import PAPER_NAMES
from mezzo_rat.reproduction.gpu.shapes import MODELS, SpeedShapes, paper_layers

IDS = {
    "table6": (
        "rat.table6",
        "rat.claim.headline_train",
        "rat.claim.train_speedups",
        "rat.claim.speedup_200k",
        "rat.claim.short_slower",
        "rat.claim.rnn_slows",
    ),
    "table7": (
        "rat.table7",
        "rat.claim.train_speedups",
        "rat.claim.speedup_200k",
        "rat.claim.short_slower",
    ),
    "table8": (
        "rat.table8",
        "rat.claim.headline_gen",
        "rat.claim.gen_speedups",
        "rat.claim.gen_l64",
        "rat.claim.oom",
    ),
    "fig5": (
        "rat.claim.throughput_rat",
        "rat.claim.throughput_hybrid",
        "rat.claim.16k_throughput",
    ),
    "table1": ("rat.table1", "rat.claim.headline_throughput"),
    "table11": ("rat.table11",),
}
"""The tables and claims that each result file answers."""
VIEWS = ("table1", "table11")
"""Result files that repeat cells of Figure 5: those of its shortest and its longest context."""


def ids_of(table: str) -> set[str]:
    """Return the tables and claims that measuring a table answers, its views included."""
    names = (table, *VIEWS) if table == "fig5" else (table,)
    return {id for name in names for id in IDS[name]}


def result_files(shapes: SpeedShapes) -> dict[str, SpeedTable]:
    """Return a description of each result file at these shapes, by its name."""
    return {table.name: table for table in (*_layers(shapes), *_generation(shapes))}


def contexts(shapes: SpeedShapes) -> dict[str, int]:
    """Return the context T of each of VIEWS."""
    return dict(zip(VIEWS, (min(shapes.contexts), max(shapes.contexts)), strict=True))


def _layers(shapes: SpeedShapes) -> list[SpeedTable]:
    shared = f"C = {shapes.d_model}, D = {shapes.head_dim}; medians of {shapes.passes} passes"
    batch = (
        f"{shapes.tokens:,} tokens a batch, bf16 autocast over a float32 residual stream, "
        f"torch.compile, {shared}"
    )
    settings = {
        "table6": f"forward and backward of one layer (norm, mixer, residual), {batch}",
        "table7": f"forward of one layer (norm, mixer, residual), {batch}",
        "table8": "one token at a position through one layer (norm, mixer, residual), whole "
        f"batch, bf16, in a CUDA graph, {shared}",
    }
    return [
        SpeedTable(
            name=name,
            ids=IDS[name],
            columns=tuple(map(str, shapes.positions if name == "table8" else shapes.lengths)),
            models=tuple(paper_layers(shapes.head_dim)),
            ratios=(("Attention", "RAT(L=16)"),),
            unit="ms",
            better="lower",
            setting=setting + _rehearsed(shapes),
            groups=tuple(f"B={B}" for B in shapes.batches) if name == "table8" else ("",),
        )
        for name, setting in settings.items()
    ]


def _generation(shapes: SpeedShapes) -> list[SpeedTable]:
    setting = (
        f"{shapes.new_tokens} new tokens after a prompt of T - {shapes.new_tokens}, random weights "
        f"of the recipes {', '.join(sorted(set(shapes.contexts.values())))}, bf16, the largest "
        f"batch whose state fits (at most {shapes.max_batch}); greedy steps in a CUDA graph, timed "
        "at the first, middle and last position; the prompts' time is left out, as it must be in "
        f"the paper's numbers, and is beside ours in the cells; {shapes.passes} passes"
    )
    lengths = {"fig5": "", **{name: f"; T = {T}" for name, T in contexts(shapes).items()}}
    return [
        SpeedTable(
            name=name,
            ids=IDS[name],
            columns=tuple(f"T={T}" for T in shapes.contexts) if not words else ("Throughput",),
            models=tuple(PAPER_NAMES[model] for model in MODELS),
            ratios=tuple((model, "Attention") for model in ("RAT(L=16)", "RAT(L=16)-SWA")),
            unit="tokens a second",
            better="higher",
            setting=setting + words + _rehearsed(shapes),
        )
        for name, words in lengths.items()
    ]


def _rehearsed(shapes: SpeedShapes) -> str:
    return "; a rehearsal, eager on a CPU" if shapes.device == "cpu" else ""
