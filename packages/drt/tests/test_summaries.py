"""Summaries: what a model writes after a text, and its ROUGE."""

import sys

import pytest
import torch
from mezzo_core.data.tokenizers import ByteTokenizer
from mezzo_core.errors import UserError
from mezzo_core.nn import LMConfig
from mezzo_drt import DRTConfig
from mezzo_drt.summaries import rouge, summarize


def test_rouge_counts_words_pairs_and_the_longest_common_order():
    pytest.importorskip("rouge_score", reason="needs the extra [summaries]")
    found = rouge(["the cat sat on mats", "so"], ["the cat sat on the mat", "no"])
    # Of 5 and 6 words 5 are the same after stemming, and of 4 and 5 pairs 3.
    assert found == pytest.approx({"R1": 500 / 11, "R2": 100 / 3, "RL": 500 / 11})


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch):
    for name in ("rouge_score", "rouge_score.rouge_scorer"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"'rouge_score': pip install 'mezzo-drt\[summaries\]'"):
        rouge(["a"], ["a"])


@pytest.mark.parametrize("references", [[], ["a", "b"]])
def test_each_summary_needs_a_reference(references):
    with pytest.raises(ValueError, match=f"got 1 summaries and {len(references)} references"):
        rouge(["a"], references)


def test_one_text_is_not_taken_for_the_list_of_its_letters():
    with pytest.raises(TypeError, match="rouge: references must be a list of texts, got a text"):
        rouge(["a", "b"], "ab")
    with pytest.raises(TypeError, match="summarize: prompts must be a list of texts, got a text"):
        summarize(None, ByteTokenizer(), "A text.")


def test_a_summary_ends_at_the_end_token_or_at_its_length():
    torch.manual_seed(0)
    layers = DRTConfig(num_layers=2, chunk_size=4, num_retrieved=2, window_size=8, head_dim=16)
    model = LMConfig(257, 32, stack=layers, tie_embeddings=False).build().eval()
    with torch.no_grad():
        model.head.weight.zero_()  # all tokens are equally likely: the first one is taken
    texts = ["A long text, to be told in short.", "Another."]
    tokenizer = ByteTokenizer()
    assert summarize(model, tokenizer, texts, max_new_tokens=5) == ["\0" * 5] * 2
    tokenizer.stop_tokens, tokenizer.begin_tokens, read = (0,), (7,), []
    model.embed.register_forward_hook(lambda _, tokens, y: read.append(tokens[0][0].tolist()))
    assert summarize(model, tokenizer, texts) == ["", ""]
    assert read == [[7, *text.encode()] for text in texts]
