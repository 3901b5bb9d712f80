"""RAT's tables and claims: what answers each, by which criterion, or what it would need.

Criteria say what the paper says. "About X times" is within a quarter of X. "Up to X times" is about
X at the highest of the ratios. The lengths 100K and 200K of the prose are those of the paper's
tables, 131072 and 262144.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from mezzo_core.papers import trainings
from mezzo_core.papers.beside import in_recipes
from mezzo_core.papers.claims import Answer, Evidence, counted, result, trained
from mezzo_core.papers.criteria import (
    AsPrinted,
    Criterion,
    Equal,
    Every,
    InOrder,
    Ratio,
    about,
    at_least,
)
from mezzo_core.papers.measurement import Entry, Measurement
from mezzo_core.papers.reproduction import Reproduction, Scale

from mezzo_rat import counts, speed
from mezzo_rat.criteria import change, grows, one_gpu_takes_as_long_as_four
from mezzo_rat.recipes import PAPER_NAMES, RECIPES
from mezzo_rat.trainings import (
    ATTENTION,
    CONTEXT_GROWTH,
    CONTEXTS,
    FEW_CHUNKS,
    FULL_QK,
    HYBRID,
    LATE_ROPE,
    LONG,
    MATCHES,
    NOPE_GAP,
    NOPE_REACHES,
    POSITIONS,
    RAT,
    RAT64,
    REVERSED_WORSE,
    RNN,
    TABLE_10,
    WINDOWS,
    at_printed_contexts,
    sharp,
    six,
    steady,
)

BETWEEN = (ATTENTION, RAT, RAT64, RNN)
LENGTHS = tuple(str(2**i) for i in range(12, 19))
"""The lengths of Tables 6 and 7, and the positions of Table 8."""
LARGE = ("B=512", "B=1024")
"""The batches at which Table 8 has the ratios of the prose."""
Look = Callable[[str], Measurement | None]
"""Returns the measurement of a speed, such as "table6"."""
Bounds = dict[str, tuple[float, float]]


def timed(
    take: str | Callable[[Look], Measurement | None], criterion: Criterion, note: str = ""
) -> tuple[Evidence, Evidence]:
    """Answer from the speeds of this run and the committed ones; `take` says from which speeds.

    This run's stand first: measured at the paper's sizes they decide. Smaller ones are only shown
    beside the committed ones.
    """
    get = (lambda look: look(take)) if isinstance(take, str) else take
    return (
        Evidence(lambda run, printed: get(run.measured), criterion, note),
        Evidence(
            lambda run, printed: get(lambda name: run.results.get(f"nvidia-h200/speed_{name}")),
            criterion,
            note,
        ),
    )


def both_phases(look: Look) -> Measurement | None:
    """Join Table 6 (training) and Table 7 (prefilling) as two groups of one measurement."""
    train, prefill = look("table6"), look("table7")
    if train is None or prefill is None:
        return None
    return replace(
        train,
        entries=(
            *(replace(entry, group="training") for entry in train.entries),
            *(replace(entry, group="prefilling") for entry in prefill.entries),
        ),
        setting=f"training: {train.setting}; prefilling: {prefill.setting}",
        source=train.source and f"{train.source} and {prefill.source}",
    )


def throughput(context: int) -> Callable[[Look], Measurement | None]:
    """Return a function that takes the column "Throughput" of Table 1 (0) or of Table 11 (-1).

    They are the first and the last context of Figure 5.
    """

    def take(look: Look) -> Measurement | None:
        ours = look("fig5")
        if ours is None:
            return None
        column = ours.columns[context]
        kept = (replace(e, column="Throughput") for e in ours.entries if e.column == column)
        setting = f"{column}; {ours.setting}"
        return replace(ours, entries=tuple(kept), columns=("Throughput",), setting=setting)

    return take


def positions_that_fit(look: Look) -> Measurement | None:
    """Count the positions of Table 8 at which each layer's batch fits into memory.

    Batches that fit everywhere are left out: they say nothing.
    """
    ours = look("table8")
    if ours is None:
        return None
    fits = [
        Entry(
            model,
            "positions",
            sum(bool(ours.by_seed(model, c, group)) for c in ours.columns),
            group,
        )
        for group, model in ours.rows
        if any(e.group == group and e.value == "OOM" for e in ours.entries)
    ]
    return replace(
        ours, entries=tuple(fits), columns=("positions",), unit="positions", better="higher"
    )


def speedup(bounds: Bounds, groups: tuple[str, ...] = (), *, best: bool = False) -> Ratio:
    """Return the criterion that attention's time over RAT(L=16)'s is within bounds, by column."""
    return Ratio(ATTENTION, RAT, bounds, groups, f"the speed of {RAT} over {ATTENTION}'s", best)


def gain(model: str, bounds: Bounds) -> Ratio:
    """Return the criterion that a model's throughput over attention's is within bounds."""
    return Ratio(model, ATTENTION, bounds, what=f"tokens a second of {model} over {ATTENTION}'s")


def small(name: str, what: str, *evidence: Evidence) -> Answer:
    """Answer from small models alone, for what the paper's own need is out of reach."""
    script = "packages/rat/experiments/train_small.py"
    otherwise = f"needs {what}; small models need a GPU: {script}"
    return Answer(f"rat.{name}", *evidence, otherwise=otherwise)


def needs(what: str, *names: str) -> Iterator[Answer]:
    """Yield the answers of tables and claims that need what this repository does not have."""
    return (Answer(f"rat.{name}", otherwise=f"needs {what}") for name in names)


_1B = "the 1.3B models trained on 100B tokens of FineWeb-Edu (2 to 3 days on 16 H100 each)"
_TASKS = f"{_1B} and the downstream data sets"
_16K = f"{_1B} once more at 16K context"
_200M = "200M models trained on 15B tokens of PG19: recipes 200m_"
_NOPE = f"{_1B}: recipes 1p3b_rat_swa_nope, 1p3b_attention_swa_nope"
_NEEDLES = f"{_1B} and fine-tuned on RULER's needle tasks"
_DATA = "the data sets that it describes, and the LLaMA2 tokenizer"
_CLUSTER = "the authors' cluster: it is a time on their H100 GPUs"
_ONE = " (of the table's columns this one)"
_PPL = " (of the perplexity alone)"
_ORDER = " (small models: the order alone)"

# Without growth, times would be equal at the same number of tokens; 10% is more than noise.
_RNN_SLOWS = Every(
    (
        change(RNN, "32768", "262144", at_least(1.1)),
        InOrder((RAT, ATTENTION), columns=("65536", "131072", "262144")),
    )
)
_SPEEDUPS = {"16384": about(2), "32768": about(3), "65536": about(4), "131072": about(7)}
_SMALLER = Every((Equal(), InOrder(columns=(f"GB at {LENGTHS[-1]}",), exact=True)))
_LATER = Every(tuple(InOrder((f"RAT(L={L})", ATTENTION), exact=True) for L in (16, 64, 128)))
_HYBRID_4K_16K = {"T=4096": about(4.5), "T=16384": about(13.9)}
# The paper prints rounded counts of tokens (15B, 2M); the recipes use powers of two near them.
_ROUNDED = {"tokens": 0.01, "batch tokens": 0.05}

ANSWERS = (
    Answer(
        "rat.table1",
        *timed(throughput(0), AsPrinted(), _ONE),
        six(AsPrinted(), _ONE),
        trained(AsPrinted(), note=_ONE),
    ),
    *needs(_TASKS, "table2", "table3"),
    *needs(_DATA, "table4.lengths"),
    *needs(f"{_TASKS} and fine-tuning on them", "table4.sft"),
    *needs(_DATA, "table5"),
    Answer("rat.table6", *timed("table6", AsPrinted())),
    Answer("rat.table7", *timed("table7", AsPrinted())),
    Answer("rat.table8", *timed("table8", AsPrinted())),
    small(
        "table9",
        f"{_200M}rat_l64, 200m_reversed_c64, ... at three contexts",
        Evidence(at_printed_contexts, AsPrinted(), " (ours at an eighth of these T)"),
    ),
    small("table10", _NOPE, result(POSITIONS, TABLE_10, _ONE)),
    Answer(
        "rat.table11", *timed(throughput(-1), AsPrinted(), _ONE), result(LONG, AsPrinted(), _ONE)
    ),
    *needs(_NEEDLES, "table12"),
    Answer(
        "rat.claim.ppl_200m",
        six(InOrder(), " (without L = 256)"),
        trained(InOrder(), *BETWEEN, note=" (without L = 256, half of the tiny context)"),
    ),
    Answer("rat.claim.ppl_between", six(InOrder(BETWEEN)), trained(InOrder(BETWEEN), *BETWEEN)),
    small(
        "claim.ablation_params",
        f"{_200M}rat_l64, 200m_rat_l64_full_qk",
        result(CONTEXTS, InOrder((RAT64, FULL_QK)), _ORDER),
    ),
    small(
        "claim.ablation_rope",
        f"{_200M}rat_l64, 200m_rat_l64_token_rope",
        result(CONTEXTS, LATE_ROPE, _ORDER),
    ),
    small(
        "claim.context_growth", f"{_200M}rnn, 200m_32k_rnn, ...", result(CONTEXTS, CONTEXT_GROWTH)
    ),
    Answer("rat.claim.chunk16_matches", six(MATCHES), trained(MATCHES, *BETWEEN[:-1])),
    Answer("rat.claim.headline_train", *timed("table6", speedup({"131072": about(7)}))),
    Answer(
        "rat.claim.headline_gen", *timed("table8", speedup({"4096": about(9)}, LARGE, best=True))
    ),
    Answer(
        "rat.claim.headline_throughput",
        *timed(
            "fig5", Every((gain(RAT, {"T=4096": about(10)}), gain(HYBRID, {"T=4096": about(4)})))
        ),
    ),
    Answer(
        "rat.claim.train_speedups",
        *timed(both_phases, Every((speedup(_SPEEDUPS), grows(ATTENTION, RAT, LENGTHS)))),
    ),
    Answer(
        "rat.claim.speedup_200k",
        *timed(both_phases, speedup({"262144": (about(9)[0], about(10)[1])})),
    ),
    Answer("rat.claim.short_slower", *timed(both_phases, InOrder(columns=("4096",)))),
    Answer("rat.claim.rnn_slows", *timed("table6", _RNN_SLOWS)),
    Answer(
        "rat.claim.gen_speedups",
        *timed(
            "table8",
            speedup({"4096": about(9), **dict.fromkeys(LENGTHS[1:], about(10))}, ("B=512",)),
        ),
    ),
    Answer(
        "rat.claim.gen_l64",
        *timed(
            "table8",
            Ratio(
                RAT,
                RAT64,
                dict.fromkeys(LENGTHS, about(4)),
                LARGE,
                f"the speed of {RAT64} over {RAT}'s",
                True,
            ),
        ),
    ),
    Answer(
        "rat.claim.oom",
        *timed(positions_that_fit, _LATER),
        counted(counts.out_of_memory, _SMALLER),
    ),
    Answer(
        "rat.claim.throughput_rat",
        *timed("fig5", gain(RAT, {"T=4096": about(10.2), "T=16384": about(15.6)})),
    ),
    Answer(
        "rat.claim.throughput_hybrid",
        *timed("fig5", gain(HYBRID, {**_HYBRID_4K_16K, "T=8192": about(8.0)})),
    ),
    *needs(
        _TASKS,
        *("claim.hybrid_gains", "claim.csr_gap", "claim.csr_rat_rnn", "claim.csr_winogrande"),
        "claim.csr_hybrid_best",
    ),
    *needs("another paper's models: it quotes their numbers beside Table 2's", "claim.deltanet"),
    *needs(
        _TASKS,
        *("claim.longbench_top2", "claim.govreport", "claim.hotpotqa", "claim.longbench_gap"),
        *("claim.trec", "claim.code_hybrid", "claim.nqa2_attention_drop", "claim.qmsum_hybrid"),
        "claim.nqa_hybrid",
    ),
    small(
        "claim.reversed_worse",
        f"{_200M}rat_l64, 200m_reversed_c64, ...",
        result(CONTEXTS, REVERSED_WORSE),
    ),
    small(
        "claim.reversed_14",
        f"{_200M}reversed_c16, 200m_reversed_c64",
        result(CONTEXTS, FEW_CHUNKS, " (14.00 is 1.06 times attention's there)"),
    ),
    Answer("rat.claim.reversed_chunks", counted(counts.reversed_chunks, Equal())),
    Answer(
        "rat.claim.fig6_rnn",
        result(POSITIONS, steady("T=512", "T=1024", "T=4096")),
        trained(steady("T=256", "T=512", "T=2048"), RNN, HYBRID, WINDOWS, by_length=True),
    ),
    Answer(
        "rat.claim.fig6_rope",
        result(POSITIONS, sharp("T=1024", "T=4096")),
        trained(sharp("T=512", "T=2048"), HYBRID, WINDOWS, by_length=True),
    ),
    small("claim.fig6_nope", _NOPE, result(POSITIONS, NOPE_REACHES)),
    small("claim.nope_gap", _NOPE, result(POSITIONS, NOPE_GAP)),
    small("claim.16k_gains", _16K, result(LONG, InOrder((HYBRID, ATTENTION)), _PPL)),
    small("claim.16k_order", _16K, result(LONG, InOrder(), _PPL)),
    Answer(
        "rat.claim.16k_throughput",
        *timed(
            "fig5",
            Every((gain(HYBRID, _HYBRID_4K_16K), grows(HYBRID, ATTENTION, tuple(_HYBRID_4K_16K)))),
        ),
    ),
    *needs(_NEEDLES, "claim.niah_order", "claim.niah_uuid"),
    Answer(
        "rat.claim.train_time_200m",
        result("nvidia-h200/train_200m", one_gpu_takes_as_long_as_four, " (T = 8192 alone)"),
        otherwise=f"needs {_CLUSTER}",
    ),
    *needs(_CLUSTER, "claim.train_time_1p3b"),
    Answer("rat.claim.flops", counted(counts.flops, counts.grows_as_claimed)),
    Answer("rat.setup.200m", in_recipes(RECIPES, _ROUNDED)),
    Answer("rat.setup.1p3b", in_recipes(RECIPES, _ROUNDED)),
    *needs("fine-tuning, which is not part of this version", "setup.sft", "setup.niah"),
    *needs("the downstream tasks, none of which is part of this version", "setup.scope"),
)

# 32 batches are 40% of the validation part.
_CPU = replace(trainings.CPU, test_lengths=(256, 512, 1024, 2048))
_SMOKE = replace(trainings.SMOKE, test_lengths=(64, 128))
REPRODUCTION = Reproduction(
    name="rat",
    module=__file__,
    answers=ANSWERS,
    models={model: RECIPES[f"tiny_{name}"]() for name, model in PAPER_NAMES.items()},
    sample=RAT,
    scales={
        "cpu": Scale(_CPU, speed.CPU, threads=1),
        "smoke": Scale(_SMOKE, speed.DRY, sample_tokens=20, threads=1),
        "gpu": Scale(_CPU, speed.FULL, needs_gpu=True),
    },
    measurers=speed.MEASURERS,
    notes=(
        "Learning rate, batch and warm-up are the same for all; batch 2 and a warm-up over a fifth "
        "of the steps were chosen on the embedded novels by trying the RNN, RAT(L=16) and "
        "attention, all three of which they help. Orders at this size depend on the budget: with a "
        "warm-up over a twentieth of the steps, attention overshot and came out last of the four. "
        "So few tokens say little about larger models.",
    ),
)
