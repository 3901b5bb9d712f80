"""Summaries that a model writes, scored by ROUGE (Table 2: XSum, CNN/DailyMail)."""

import statistics
from collections.abc import Sequence

from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.libraries import import_library
from mezzo_core.nn import LM, generate

MEASURES = {"R1": "rouge1", "R2": "rouge2", "RL": "rougeLsum"}
"""The library's name of each of the paper's measures. RL is computed over lines, as is usual."""


def summarize(
    model: LM, tokenizer: Tokenizer, prompts: Sequence[str], *, max_new_tokens: int = 128
) -> list[str]:
    """Continue each prompt greedily, up to a stop token.

    Args:
        model: fine-tuned on texts, each followed by its summary.
        tokenizer: the model's.
        prompts: each is a text, and the words between text and summary in the fine-tuning.
        max_new_tokens: of a summary.

    Raises:
        TypeError: if `prompts` is a single string.
    """
    _check_list("summarize", "prompts", prompts)
    rows = [
        generate(
            model,
            [[*tokenizer.begin_tokens, *tokenizer.encode(prompt)]],
            max_new_tokens=max_new_tokens,
            stop_tokens=tokenizer.stop_tokens,
        )
        for prompt in prompts
    ]
    return [tokenizer.decode(tokens).strip() for (tokens,) in rows]


def rouge(summaries: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the mean F1 of ROUGE-1, -2 and -L in percent, of stemmed words, by rouge-score.

    Raises:
        TypeError: if summaries or references are a single string.
        UserError: if the library is not installed.
        ValueError: if there are no summaries, or not as many references.
    """
    _check_list("rouge", "summaries", summaries)
    _check_list("rouge", "references", references)
    if not summaries or len(summaries) != len(references):
        raise ValueError(
            f"rouge needs a reference for each summary, got {len(summaries)} summaries and "
            f"{len(references)} references"
        )
    library = import_library("rouge_score.rouge_scorer", "summaries", package="mezzo-drt")
    scorer = library.RougeScorer(list(MEASURES.values()), use_stemmer=True)
    scores = [
        scorer.score(reference, summary)
        for summary, reference in zip(summaries, references, strict=True)
    ]
    return {
        name: 100 * statistics.mean(score[measure].fmeasure for score in scores)
        for name, measure in MEASURES.items()
    }


def _check_list(function: str, name: str, texts: Sequence[str]) -> None:
    """Refuse a single string, which would be taken for a list of its letters."""
    if isinstance(texts, str):
        raise TypeError(f"{function}: {name} must be a list of texts, got a text")
