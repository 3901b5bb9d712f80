"""The paper's tables and claims: what answers each, by which criterion, or what it would need.

Criteria say what the paper says. "About X" is within a quarter of X; an accuracy is near another
within ten points. Small models answer which perplexity is lower, not by how much.

The results that an experiment on a GPU writes, and the names in them that are read here:

- `passkey`, `two_hop`: accuracies in %, the models and columns (lengths) of Table 2.
- `long_documents_gpt2`: perplexities of the small recipes by Table 1's names; a column for each
  length of the evaluation, in tokens. The models are trained at 4,096 tokens.
- `inference`: ms a token and GB, the columns of Table 3; groups are its prompts, "16K" and "48K".
- `training_speed`: tokens/s, the models and columns of Table 4, with `peak_gb` beside each.
- `length`: ms of a training step, for each of its sequences, by their tokens.

The last three are `speed.py`'s, which a run at the scale "gpu" measures itself.
"""

from collections.abc import Iterator
from dataclasses import replace

from mezzo_core.papers.beside import in_recipes
from mezzo_core.papers.claims import Answer, Evidence, Run, counted, measured, result, trained
from mezzo_core.papers.criteria import (
    AsPrinted,
    Criterion,
    Equal,
    Every,
    InOrder,
    Judgement,
    Ratio,
    about,
)
from mezzo_core.papers.growth import Growth, Steady, Within
from mezzo_core.papers.measurement import Entry, Measurement
from mezzo_core.papers.published import Claim, Table
from mezzo_core.papers.reproduction import Reproduction, Scale
from mezzo_core.papers.trainings import SMOKE, Budget

from mezzo_drt import counts, equations, speed
from mezzo_drt.criteria import AtLeast, Gap, NearPrinted, Runs
from mezzo_drt.recipes import PAPER_NAMES, RECIPES
from mezzo_drt.speed import BLOCK_RECURRENT, LANDMARK, PLAIN, WINDOW

BASE, WIDE, DEEP, DRT1, DRT2, NO_GUMBEL, RANDOM, *_ = PAPER_NAMES.values()
TIMED_ON = "nvidia-h200"
PASSKEY, TWO_HOP = f"{TIMED_ON}/passkey", "nvidia-h100/two_hop"
DOCUMENTS = "nvidia-h100/long_documents_gpt2"
INFERENCE, SPEED, LENGTH = "inference", "training_speed", "length"
SHORT, TRAINED_AT, LONG = "2048", "4096", "16384"
"""The lengths of the small models' evaluation: the paper's 2K, 16K, and what is longer."""
LONGEST = ("4K", "8K", "16K", "32K", "64K", "128K", "256K", "16M")
PRINTED = "128M PG19 valid"

_GPU = "needs a GPU: packages/drt/experiments"
_LANGUAGE = "needs the models trained on 31B tokens of PG19 and of arXiv-math (recipes 128m_..., "
_LANGUAGE += "350m_...)"
_SUMMARIES = "needs the PG19 models fine-tuned on the data set's training part"
_CITED = "says what another paper used: nothing to measure"
_SMALL = " (small models, trained at 4,096 tokens: the order alone)"
_TINY = " (two tiny models, trained at 256 bytes)"


def perplexity_at(length: str) -> Evidence:
    """Answer a part of Table 1 from the small models' perplexities at one length."""

    def find(run: Run, printed: Table | Claim) -> Measurement | None:
        ours = run.results.get(DOCUMENTS)
        return None if ours is None else at_length(ours, length)

    return Evidence(find, AsPrinted(), _SMALL)


def at_length(ours: Measurement, length: str) -> Measurement:
    """Return the perplexities at one length, as a column of Table 1."""
    found = (replace(e, column=PRINTED) for e in ours.entries if e.column == length)
    setting = f"{ours.setting}; here at {length} tokens"
    return replace(ours, entries=tuple(found), columns=(PRINTED,), setting=setting)


def inference_costs(printed: Table | Claim, ours: Measurement) -> Judgement:
    """Judge whether each model costs about as many times BaseLM's time and memory as printed."""
    assert isinstance(printed, Table)
    parts: list[Criterion] = []
    for row in printed.rows:
        prompt, model = str(row.values[0]), row.model.partition(" / ")[0]
        cells = zip(printed.columns[2:], row.values[2:], strict=True)
        bounds = {column: about(value) for column, value in cells if not isinstance(value, str)}
        if any(ours.cell(model, column, prompt) for column in bounds):
            what = f"{model} over {PLAIN}, prompts of {prompt}"
            parts.append(Ratio(model, PLAIN, bounds, (prompt,), what))
    return Every(tuple(parts))(printed, ours)


def timed(name: str, criterion: Criterion) -> tuple[Evidence, Evidence]:
    """Answer from the speed that this run measures, and from the committed one."""
    return measured(name, criterion), result(f"{TIMED_ON}/{name}", criterion)


def peak_memory(evidence: Evidence) -> Evidence:
    """Answer from the highest memory that was measured beside speeds."""

    def find(run: Run, printed: Table | Claim) -> Measurement | None:
        ours = evidence.find(run, printed)
        return None if ours is None else in_gigabytes(ours)

    return replace(evidence, find=find)


def in_gigabytes(ours: Measurement) -> Measurement:
    """Return the peaks of a result's rows; those of what did not fit stay words."""

    def turned(entry: Entry) -> Entry:
        is_word = isinstance(entry.value, str)
        return entry if is_word else replace(entry, value=float(entry.details["peak_gb"]))

    found = tuple(turned(entry) for entry in ours.entries)
    return replace(ours, entries=found, unit="GB", better="lower")


def training_memory(printed: Table | Claim, ours: Measurement) -> Judgement:
    """Judge whether DRT needs about as many times the window Transformer's memory as printed."""
    assert isinstance(printed, Table)
    parts: list[Criterion] = []
    for model in (DRT1, DRT2):
        ratios = {
            column: about(printed.column(column)[model] / printed.column(column)[WINDOW])
            for column in printed.columns
            if ours.by_seed(model, column) and ours.by_seed(WINDOW, column)
        }
        parts.append(Ratio(model, WINDOW, ratios))
    return Every(tuple(parts))(printed, ours)


def needs(what: str, *names: str) -> Iterator[Answer]:
    """Yield the answers of tables and claims that need what this repository does not have."""
    return (Answer(f"drt.{name}", otherwise=what) for name in names)


_TWICE_FOR_LITTLE = Ratio(
    DRT1,
    DRT2,
    dict.fromkeys(("350M, 32K", "760M, 16K", "1.5B, 8K", "3B, 4K"), (0.9, 1.05)),
    what="tokens/s with one retrieval over those with two",
)
_TWO_HOPS = Every(
    (
        Gap(DRT2, DRT1, ("64K", "256K", "4M"), 20),
        Gap(DRT2, LANDMARK, ("1K", "4K"), -10),
    )
)
_EFFICIENT = Every(
    (
        InOrder((DEEP, DRT1), columns=(SHORT,)),
        InOrder((DRT1, DEEP), columns=(TRAINED_AT, LONG)),
    )
)
_BEYOND = Every(tuple(InOrder((DRT2, other), columns=(LONG,)) for other in (BASE, WIDE, DEEP)))
_LINEAR = Growth({DRT1: (0.9, 1.1)}, tuple(str(2**i) for i in range(12, 17)))
_ROUNDED = {"total tokens": 0.025}  # 32.2 billion, but 60,000 steps of 2^19 are 31.5

ANSWERS = (
    Answer("drt.table1.eval_2k", perplexity_at(SHORT), otherwise=_LANGUAGE),
    Answer("drt.table1.eval_16k", perplexity_at(TRAINED_AT), otherwise=_LANGUAGE),
    Answer("drt.table1.eval_unknown", perplexity_at(LONG), otherwise=_LANGUAGE),
    Answer(
        "drt.table1.ablation",
        result(DOCUMENTS, InOrder((DRT1, NO_GUMBEL, RANDOM), columns=(TRAINED_AT,)), _SMALL),
        otherwise=_LANGUAGE,
    ),
    Answer("drt.table2.single_niah", result(PASSKEY, NearPrinted(10)), otherwise=_GPU),
    *needs(_SUMMARIES, "table2.xsum", "table2.cnn_dailymail"),
    Answer("drt.table2.two_hop_niah", result(TWO_HOP, NearPrinted(10)), otherwise=_GPU),
    Answer("drt.table3", *timed(INFERENCE, inference_costs), otherwise=_GPU),
    Answer("drt.table4.throughput", *timed(SPEED, AsPrinted()), otherwise=_GPU),
    Answer(
        "drt.table4.memory", *map(peak_memory, timed(SPEED, training_memory)), otherwise=_GPU
    ),
    *needs("shows two examples of text, which `mezzo_drt.needles` writes", "table5"),
    Answer(
        "drt.claim.length_generalization",
        result(PASSKEY, Every(tuple(AtLeast(95, model, ("16M",)) for model in (DRT1, DRT2)))),
        otherwise=_GPU,
    ),
    Answer(
        "drt.claim.passkey_16m",
        result(PASSKEY, Every(tuple(AtLeast(98.5, model, LONGEST) for model in (DRT1, DRT2)))),
        otherwise=_GPU,
    ),
    Answer("drt.claim.pretrain_64k", *timed(LENGTH, Runs(DRT1, "65536")), otherwise=_GPU),
    Answer("drt.claim.complexity_full", counted(counts.complexity_full, Steady())),
    Answer("drt.claim.complexity_scores", counted(counts.complexity_scores, Steady())),
    Answer("drt.claim.complexity_total", counted(counts.complexity_total, Steady())),
    Answer(
        "drt.claim.linear_attention_cost",
        counted(counts.linear_attention_cost, Steady(), " (the scores are quadratic, but few)"),
    ),
    Answer("drt.claim.kv_memory_full", counted(counts.kv_memory_full, Steady())),
    Answer("drt.claim.kv_memory_offload", counted(counts.kv_memory_offload, Steady(2))),
    Answer("drt.claim.swap_frequency", counted(counts.swap_frequency, Equal())),
    Answer("drt.claim.retrieval_vs_landmark", counted(counts.retrieval_vs_landmark, Equal())),
    Answer("drt.claim.relevance_score", counted(equations.relevance_score, Within(1e-12))),
    Answer("drt.claim.gca_fusion", counted(equations.gca_fusion, Within(1e-12))),
    Answer("drt.claim.gca_head", counted(equations.gca_head, Within(1e-12))),
    Answer("drt.claim.group_map", counted(counts.group_map, Equal())),
    Answer("drt.claim.config", in_recipes(RECIPES)),
    Answer("drt.claim.baseline_field_768", counted(counts.baseline_field_768, Equal())),
    Answer(
        "drt.claim.baseline_14_layers", counted(counts.baseline_14_layers, Equal(counts.NEAR))
    ),
    Answer("drt.claim.architecture_hyper", in_recipes(RECIPES)),
    Answer("drt.claim.optimizer", in_recipes(RECIPES)),
    Answer("drt.claim.training_budget", in_recipes(RECIPES, _ROUNDED)),
    Answer("drt.claim.train_context", in_recipes(RECIPES)),
    Answer(
        "drt.claim.brt_time",
        *timed(
            LENGTH,
            Ratio(BLOCK_RECURRENT, BASE, {"16384": about(5)}, what="time of a step at 16K tokens"),
        ),
        otherwise=_GPU,
    ),
    Answer(
        "drt.claim.beyond_16k",
        result(DOCUMENTS, _BEYOND, _SMALL),
        trained(
            InOrder((DRT1, BASE), columns=("T=1024", "T=4096")), DRT1, BASE,
            by_length=True, note=_TINY,
        ),
        otherwise=_LANGUAGE,
    ),
    Answer(
        "drt.claim.parameter_efficiency",
        result(DOCUMENTS, _EFFICIENT, _SMALL),
        otherwise=_LANGUAGE,
    ),
    Answer(
        "drt.claim.multiple_retrievals",
        result(DOCUMENTS, InOrder((DRT2, DRT1), columns=(TRAINED_AT, LONG)), _SMALL),
        *timed(SPEED, _TWICE_FOR_LITTLE),
        otherwise=_LANGUAGE,
    ),
    Answer("drt.claim.two_hop", result(TWO_HOP, _TWO_HOPS), otherwise=_GPU),
    Answer("drt.claim.train_time_linear", *timed(LENGTH, _LINEAR), otherwise=_GPU),
    Answer(
        "drt.claim.extrapolation",
        result(
            DOCUMENTS,
            Steady(1.05, (BASE, DRT1), (TRAINED_AT, LONG)),
            " (four times the training length, not 1000)",
        ),
        trained(
            Steady(1.05, (BASE, DRT1), ("T=256", "T=1024", "T=4096")), DRT1, BASE,
            by_length=True, note=_TINY,
        ),
        otherwise=_LANGUAGE,
    ),
    *needs("needs recipes of the fine-tuning on needles", "claim.finetune_steps"),
    *needs("needs Contriever, an encoder with weights of its own", "claim.rpt_chunks"),
    *needs(_CITED, "claim.rpt_reference"),
)  # fmt: skip

_CPU = Budget(
    steps=200,
    batch_size=4,
    seq_len=256,
    eval_batches=20,
    test_lengths=(256, 1024, 4096),
)
REPRODUCTION = Reproduction(
    name="drt",
    module=__file__,
    answers=ANSWERS,
    models={PAPER_NAMES[name]: RECIPES[f"tiny_{name}"]() for name in ("base", "drt1")},
    sample=DRT1,
    scales={
        "cpu": Scale(_CPU, sample_tokens=300),
        "smoke": Scale(replace(SMOKE, test_lengths=(64, 256)), sample_tokens=20, threads=1),
        "gpu": Scale(_CPU, speed.PAPER, sample_tokens=300, needs_gpu=True),
    },
    measurers=speed.MEASURERS,
    notes=(
        "Both have the same data, schedule and learning rate, which was chosen by trying both. A "
        "byte model of this size learns spelling, which a window of 32 bytes holds: what it gains "
        "by reading further says little about the paper's models. DRT also has more weights, those "
        "of its encoder and its cross-attention.",
    ),
)
