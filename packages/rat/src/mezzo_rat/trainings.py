"""Results of trainings on a GPU: their files, the names in them, and what each must show.

Losses and perplexities of small models say which is lower; a claim's sizes are taken as shares.
"""

from dataclasses import replace

from mezzo_core.papers.claims import Evidence, Run, swept
from mezzo_core.papers.criteria import Criterion, Every, InOrder, Ratio, at_least
from mezzo_core.papers.measurement import Measurement
from mezzo_core.papers.published import Claim, Table

from mezzo_rat.criteria import change, grows

RNN, RAT, RAT64, ATTENTION = "RNN", "RAT(L=16)", "RAT(L=64)", "Attention"
HYBRID, WINDOWS = "RAT(L=16)-SWA", "Attention-SWA"
STARTED = f", started as {RAT}"
"""Follows the name of a model whose gates remember as few tokens as RAT's at the start."""
FULL_QK, TOKEN_ROPE = f"{RAT64}, full q and k", f"{RAT64}, RoPE by token"
NOPE = " NoPE"
"""Follows the name of a hybrid without positions in its global layers."""
PERPLEXITY = "Val. PPL"
SIX = "nvidia-h200/train_six"
CONTEXTS = "nvidia-h100/train_contexts"
LONG, POSITIONS = "nvidia-h200/train_long", "nvidia-h200/train_positions"
IN_PLACE_OF = {"T=1024": "T=8192", "T=2048": "T=16384", "T=4096": "T=32768"}
"""The contexts of CONTEXTS, and Table 9's in whose place they stand."""
FIRST, *_, LAST = IN_PLACE_OF
SHARP = 1.1
"""How many times higher the loss, in nats, must be at four times the training's T to be sharp."""


def six(criterion: Criterion, note: str = "") -> Evidence:
    """Answer from the six architectures, each at its best rate."""
    return swept(SIX, PERPLEXITY, criterion, note)


def at_printed_contexts(run: Run, printed: Table | Claim) -> Measurement | None:
    """Return the trainings at several contexts, under the contexts that the paper has."""
    ours = run.results.get(CONTEXTS)
    if ours is None:
        return None
    found = (replace(entry, column=IN_PLACE_OF[entry.column]) for entry in ours.entries)
    columns = tuple(IN_PLACE_OF[column] for column in ours.columns)
    return replace(ours, entries=tuple(found), columns=columns)


def steady(half: str, trained_at: str, longest: str) -> Criterion:
    """Return the criterion that the RNN's loss stays, and is the highest up to the training's T."""
    inside = (half, trained_at)
    return Every(
        (
            InOrder((HYBRID, RNN), columns=inside),
            InOrder((WINDOWS, RNN), columns=inside),
            change(RNN, trained_at, longest, (0.0, 1.02)),
        )
    )


def sharp(trained_at: str, longest: str) -> Criterion:
    """Return the criterion that the hybrids' loss rises beyond the training's T, RAT's less."""
    return Every(
        (
            change(HYBRID, trained_at, longest, at_least(SHARP)),
            change(WINDOWS, trained_at, longest, at_least(SHARP)),
            InOrder((HYBRID, WINDOWS), columns=(longest,)),
        )
    )


NOPE_REACHES = Every(
    (
        InOrder((HYBRID + NOPE, WINDOWS + NOPE), columns=("T=4096",)),
        InOrder((HYBRID + NOPE, HYBRID), columns=("T=4096",)),
        InOrder((WINDOWS + NOPE, WINDOWS), columns=("T=4096",)),
        change(HYBRID + NOPE, "T=1024", "T=4096", (0.0, SHARP)),
    )
)
# The printed gaps are half a percent of the loss.
NOPE_GAP = Every(
    tuple(Ratio(model + NOPE, model, {"T=1024": (1.0, 1.01)}) for model in (HYBRID, WINDOWS))
)
TABLE_10 = InOrder((HYBRID, WINDOWS, HYBRID + NOPE, WINDOWS + NOPE), columns=("T=1024",))

# In Table 1 RAT(L=16) is 0.8% above attention, so "matches" is read as within 1%.
MATCHES = Every(
    (
        Ratio(RAT, ATTENTION, {PERPLEXITY: (0.0, 1.01)}),
        Ratio(RAT64, ATTENTION, {PERPLEXITY: at_least(1.01)}),
        InOrder((RAT, RAT64)),
    )
)
LATE_ROPE = Every(
    (InOrder((RAT64, TOKEN_ROPE), columns=(LAST,)), grows(TOKEN_ROPE, RAT64, (FIRST, LAST)))
)
# "Stable" is read as at most 2% higher, "sharply" as at least 5%, "clearly" as at least 2%.
CONTEXT_GROWTH = Every(
    (
        change(RNN, FIRST, LAST, at_least(1.05)),
        *(change(model, FIRST, LAST, (0.0, 1.02)) for model in (ATTENTION, RAT64, "RAT(L=128)")),
    )
)
REVERSED_WORSE = Every(
    tuple(
        Ratio(f"RAT-Reversed(C={n})", f"RAT(L={n})", dict.fromkeys(IN_PLACE_OF, at_least(1.02)))
        for n in (64, 128)
    )
)
# The perplexity of 14.00 is 1.06 times attention's, in the mean over Table 9's contexts.
FEW_CHUNKS = Every(
    tuple(
        Ratio(f"RAT-Reversed(C={n})", ATTENTION, dict.fromkeys(IN_PLACE_OF, bounds))
        for n, bounds in ((16, (0.0, 1.06)), (64, at_least(1.06)), (128, at_least(1.06)))
    )
)
