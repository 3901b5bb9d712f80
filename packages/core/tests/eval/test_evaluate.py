import math

import pytest
import torch
from mezzo_core.data import Batch
from mezzo_core.eval.evaluate import evaluate, evaluate_segments
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.lm import LMConfig


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LMConfig(vocab_size=11, d_model=16, mixers=(AttentionConfig(head_dim=8),))
    return config.build()


def batches(ignored=()):
    generator = torch.Generator().manual_seed(1)
    for rows in (2, 3):
        tokens = torch.randint(11, (rows, 8), generator=generator)
        targets = torch.randint(11, (rows, 8), generator=generator)
        targets[:, list(ignored)] = -100
        yield Batch(tokens, targets)


def test_a_model_that_knows_nothing_has_the_vocabulary_s_perplexity(model):
    torch.nn.init.zeros_(model.head.weight)
    found = evaluate(model, batches(), num_bytes=20)
    assert found.loss == pytest.approx(math.log(11), rel=1e-6)
    assert found.perplexity == pytest.approx(11, rel=1e-5)
    assert found.tokens == 40
    assert found.bits_per_byte == pytest.approx(40 * math.log2(11) / 20, rel=1e-6)


def test_targets_without_bytes_have_no_bits_a_byte(model):
    assert evaluate(model, batches(), num_bytes=0).bits_per_byte is None


def test_every_target_weighs_the_same_however_it_is_batched(model):
    whole = Batch(
        torch.cat([batch.tokens for batch in batches()]),
        torch.cat([batch.targets for batch in batches()]),
    )
    assert evaluate(model, batches()).loss == pytest.approx(evaluate(model, [whole]).loss)


@pytest.mark.parametrize("segment_tokens", [1, 3, 8])
def test_segments_give_what_whole_rows_give(model, segment_tokens):
    whole = evaluate(model, batches())
    found = evaluate(model, batches(), segment_tokens=segment_tokens)
    assert found.loss == pytest.approx(whole.loss, rel=1e-6)
    assert (found.accuracy, found.tokens) == (whole.accuracy, whole.tokens)


@pytest.mark.parametrize(
    ("segment_tokens", "pieces"), [(4, [(1, 4), (1, 4), (1, 1)]), (None, [(1, 9)])]
)
def test_what_has_no_targets_is_left_out(model, segment_tokens, pieces):
    """As a short text, which is one row of a batch, and ends in the middle of it."""
    (whole,) = (Batch(*(part.repeat(4, 2) for part in batch[:2])) for batch in list(batches())[:1])
    whole.targets[1:] = -100
    whole.targets[0, 9:] = -100
    read = []
    model.embed.register_forward_hook(lambda _, tokens, y: read.append(tokens[0].shape))
    found = evaluate(model, [whole], segment_tokens=segment_tokens)
    assert read == pieces
    together = evaluate(model, [whole], segment_tokens=segment_tokens, add_up=lambda sums: None)
    assert read[-1] == (pieces[-1] if segment_tokens else whole.tokens.shape), "all of one shape"
    assert found.loss == pytest.approx(together.loss, rel=1e-6)
    assert found.tokens == 9


def test_a_batch_that_is_mostly_targets_runs_whole(model):
    """So that the result equals that of a training to the bit."""
    read = []
    model.embed.register_forward_hook(lambda _, tokens, y: read.append(tokens[0].shape))
    evaluate(model, batches(ignored=[7]))
    assert read == [(2, 8), (3, 8)]


def test_packed_documents_have_no_segments(model):
    batch = Batch(
        torch.ones(1, 8, dtype=torch.int64),
        torch.ones(1, 8, dtype=torch.int64),
        torch.tensor([0, 3, 8]),
    )
    with pytest.raises(ValueError, match="None where documents are packed"):
        evaluate(model, [batch], segment_tokens=4)


def test_accuracy_is_the_share_of_hits(model):
    tokens = torch.randint(11, (2, 8))
    targets = model(tokens).logits.argmax(-1)
    targets[0, :4], targets[1] = -100, (targets[1] + 1) % 11
    assert evaluate(model, [Batch(tokens, targets)]).accuracy == 4 / 12


@pytest.mark.parametrize("segment_tokens", [None, 3])
def test_a_row_is_right_if_all_its_targets_are(model, segment_tokens):
    tokens = torch.randint(11, (4, 8))
    targets = model(tokens).logits.argmax(-1)
    targets[0, 1:] = targets[2, :7] = -100  # right
    targets[1, 2] = (targets[1, 2] + 1) % 11  # one mistake
    targets[3] = -100  # nothing is asked for
    batch = Batch(tokens, targets)
    found = evaluate(model, [batch.part(0, 2), batch.part(1, 2)], segment_tokens=segment_tokens)
    assert found.exact_match == 2 / 3
    assert found.accuracy == 9 / 10


def test_a_row_that_processes_share_is_right_if_its_parts_are(model):
    tokens = torch.randint(11, (4, 8))
    parts = [Batch(half, model(half).logits.argmax(-1)) for half in tokens.split(4, 1)]
    parts[0].targets[0, 1] = -100  # right
    parts[1].targets[1, 2] = (parts[1].targets[1, 2] + 1) % 11  # a mistake in the second part
    parts[0].targets[2] = parts[1].targets[3] = -100  # asked for in one part alone: right
    told = []
    evaluate(model, parts[1:], add_parts=lambda values: told.append(values.clone()))
    found = evaluate(model, parts[:1], add_parts=lambda values: values.add_(told[0]))
    assert found.exact_match == 3 / 4


def test_packed_documents_are_no_rows(model):
    tokens = torch.randint(11, (1, 8))
    packed = Batch(tokens, tokens, torch.tensor([0, 3, 8]))
    assert evaluate(model, [packed]).exact_match is None


def test_ignored_targets_do_not_count(model):
    found = evaluate(model, batches(ignored=[0, 5]))
    assert found.tokens == 30
    assert found.loss != pytest.approx(evaluate(model, batches()).loss, rel=1e-6)


@pytest.mark.parametrize("precision", ["fp16", "BF16", None])
def test_an_unknown_precision_is_named(model, precision):
    with pytest.raises(ValueError, match=f"precision must be .*, got {precision!r}"):
        evaluate(model, batches(), precision=precision)
    with pytest.raises(ValueError, match="precision"):
        evaluate_segments(model, [batches()], precision=precision)


def test_nothing_to_predict_is_an_error(model):
    with pytest.raises(ValueError, match="at least one target"):
        evaluate(model, batches(ignored=range(8)))


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(model, training):
    model.train(training)
    evaluate(model, batches())
    assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_mode_of_every_module_comes_back(model):
    model.train()
    model.stack.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    evaluate(model, batches())
    assert [module.training for module in model.modules()] == modes


def test_a_hopeless_model_has_infinite_perplexity(model):
    with torch.no_grad():
        model.head.weight.mul_(1e6)
    found = evaluate(model, batches())
    assert math.isfinite(found.loss)
    assert found.perplexity == math.inf


def pieces(batch, size):
    return (Batch(*part) for part in zip(*(x.split(size, 1) for x in batch[:2]), strict=True))


@pytest.mark.parametrize("size", [1, 3, 8])
def test_rows_that_come_in_segments_score_as_whole_rows(model, size):
    ignored = (0, 1, 2, 4)  # segments without targets are among the shorter ones
    whole = evaluate(model, batches(ignored))
    found = evaluate_segments(model, (pieces(batch, size) for batch in batches(ignored)))
    assert found.loss == pytest.approx(whole.loss, rel=1e-6)
    assert found.tokens == whole.tokens == 20
    assert (found.accuracy, found.exact_match) == (whole.accuracy, whole.exact_match)


def test_a_segment_without_targets_does_not_run_through_the_head(model):
    seen = []
    model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    evaluate_segments(model, (pieces(batch, 4) for batch in batches(ignored=range(6))))
    assert seen == [1, 4, 1, 4]


def test_one_segment_is_taken_at_a_time(model):
    """A row's next segment is drawn when the one before has been scored."""
    log = []

    def segments():
        for batch in pieces(next(batches()), 2):
            log.append("drawn")
            yield batch

    model.stack.register_forward_hook(lambda *_: log.append("run"))
    evaluate_segments(model, [segments()])
    assert log == ["drawn", "run"] * 4


def test_segments_of_other_rows_are_refused(model):
    first, second = batches()
    with pytest.raises(ValueError, match="segments must have the same rows, got 3 after 2"):
        evaluate_segments(model, [[first, second]])
