"""Sliding windows ask for each target once, and give it its context."""

import pytest
import torch
from mezzo_core.data import Batch
from mezzo_core.eval.evaluate import evaluate
from mezzo_core.eval.sliding import sliding_windows
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.lm import LMConfig


def rows(num_tokens):
    text = torch.randint(11, (2, num_tokens + 1), generator=torch.Generator().manual_seed(0))
    return Batch(text[:, :-1], text[:, 1:])


def test_windows_of_four_by_two_over_seven_tokens():
    tokens = torch.arange(7)[None]
    windows = list(sliding_windows(Batch(tokens, tokens + 1), 4, 2))
    assert [window.tokens[0].tolist() for window in windows] == [
        [0, 1, 2, 3],
        [2, 3, 4, 5],
        [3, 4, 5, 6],
    ]
    assert [window.targets[0].tolist() for window in windows] == [
        [1, 2, 3, 4],
        [-100, -100, 5, 6],
        [-100, -100, -100, 7],
    ]


@pytest.mark.parametrize(("window_size", "stride"), [(1, 1), (5, 1), (5, 3), (8, 8), (40, 4)])
def test_every_target_is_asked_for_once(window_size, stride):
    batch = rows(23)
    asked = [w.targets[w.targets != -100] for w in sliding_windows(batch, window_size, stride)]
    assert sorted(torch.cat(asked).tolist()) == sorted(batch.targets.flatten().tolist())


@pytest.mark.parametrize(("stride", "is_whole"), [(1, True), (6, True), (7, False), (9, False)])
def test_a_model_with_a_shorter_window_scores_as_on_whole_rows(stride, is_whole):
    """A layer that sees 4 tokens needs windows of 9 tokens to overlap by 3."""
    torch.manual_seed(0)
    model = LMConfig(
        vocab_size=11,
        d_model=16,
        mixers=(AttentionConfig(head_dim=8, window_size=4),),
        init_std=0.5,
    ).build()
    whole = evaluate(model, [rows(40)])
    found = evaluate(model, sliding_windows(rows(40), 9, stride))
    assert found.tokens == whole.tokens
    assert (found.loss == pytest.approx(whole.loss, rel=1e-6)) == is_whole


@pytest.mark.parametrize(
    ("window_size", "stride", "message"),
    [
        (0, 1, "window_size must be 1 or more, got 0"),
        (4, 0, "stride must be 1 or more, got 0"),
        (4, 5, "stride must be at most window_size, 4, got 5"),
    ],
)
def test_sizes_out_of_range_are_refused(window_size, stride, message):
    with pytest.raises(ValueError, match=message):
        next(sliding_windows(rows(8), window_size, stride))


def test_packed_documents_are_refused():
    batch = Batch(*(part[:1] for part in rows(8)[:2]), torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="takes rows, and this batch has packed documents"):
        next(sliding_windows(batch, 4, 2))
