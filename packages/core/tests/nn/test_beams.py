"""Beam search: with enough beams it finds the best of all continuations."""

import itertools
from dataclasses import replace

import pytest
import torch
from mezzo_core.nn import AttentionConfig, beam_search, generate
from toys.running_mean import RunningMeanConfig

MIXERS = {
    "running mean": (RunningMeanConfig(),) * 2,
    "attention": (AttentionConfig(head_dim=8),) * 2,
    "window": (AttentionConfig(head_dim=8, window_size=3),) * 2,
}


@pytest.fixture(params=MIXERS)
def model(request, config):
    torch.manual_seed(0)
    return replace(config, vocab_size=5, mixers=MIXERS[request.param]).build().double()


@torch.no_grad()
def scored(model, prompt, continuations):
    """Return the sum of the log-probabilities of each one's tokens, by one whole forward."""
    new = torch.tensor([list(tokens) for tokens in continuations])
    tokens = torch.cat([torch.tensor([prompt]).expand(len(new), -1), new], 1)
    logits = model(tokens).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
    sums = logits.gather(-1, new[..., None]).sum((1, 2))
    return dict(zip(continuations, sums.tolist(), strict=True))


def test_as_many_beams_as_continuations_find_the_best_of_all(model):
    prompts = [[1, 2, 3], [4]]
    found = beam_search(model, prompts, num_beams=5**3, max_new_tokens=3)
    for prompt, beams in zip(prompts, found, strict=True):
        every = scored(model, prompt, list(itertools.product(range(5), repeat=3)))
        best = sorted(every, key=every.get, reverse=True)
        assert [tuple(beam.tokens) for beam in beams[:9]] == best[:9]
        assert [beam.score for beam in beams] == pytest.approx(sorted(every.values())[::-1])


def test_scores_do_not_depend_on_the_default_dtype(model):
    asked = {"num_beams": 4, "max_new_tokens": 3}
    found = beam_search(model, [[1, 2]], **asked)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert beam_search(model, [[1, 2]], **asked) == found
    finally:
        torch.set_default_dtype(torch.float32)


def test_scores_of_a_bfloat16_model_are_summed_in_float64(model):
    found = beam_search(model.bfloat16(), [[1, 2]], num_beams=5, max_new_tokens=1)[0]
    with torch.no_grad():
        scores = model(torch.tensor([[1, 2]])).logits[0, -1].double().log_softmax(-1)
    assert [beam.score for beam in found] == pytest.approx(scores.sort(descending=True)[0].tolist())


def test_a_model_that_works_before_steps_finds_the_same(model):
    asked = {"num_beams": 4, "max_new_tokens": 6}
    rewinding = beam_search(model.rewinding(1), [[1, 2]], **asked)[0]
    expected = beam_search(model, [[1, 2]], **asked)[0]
    assert [beam.tokens for beam in rewinding] == [beam.tokens for beam in expected]


@pytest.mark.parametrize("wrong", [[3], range(5)])
def test_outputs_that_are_no_numbers_are_refused(model, wrong):
    model.embed.weight.data[list(wrong)] = float("nan")
    with pytest.raises(ValueError, match="the model's outputs are no numbers"):
        beam_search(model, [[1, 2]], num_beams=2, max_new_tokens=3)


def test_one_beam_is_greedy(model, monkeypatch):
    prompts, step, steps = [[1, 2, 3], [4], [0, 0]], model.step, []
    monkeypatch.setattr(model, "step", lambda *args: steps.append(args) or step(*args))
    found = beam_search(model, prompts, num_beams=1, max_new_tokens=7)
    assert len(steps) == 6  # the prompt gave the first token
    assert [beams[0].tokens for beams in found] == generate(model, prompts, max_new_tokens=7)


def test_what_ended_keeps_its_score_and_its_place(model):
    found = beam_search(model, [[1, 2]], num_beams=25, max_new_tokens=2, stop_tokens=[0])[0]
    whole = scored(model, [1, 2], list(itertools.product(range(1, 5), repeat=2)))
    for ended in ([(0,)], [(i, 0) for i in range(1, 5)]):
        whole |= {new[:-1]: score for new, score in scored(model, [1, 2], ended).items()}
    assert {tuple(beam.tokens): beam.score for beam in found} == pytest.approx(whole)
    few = beam_search(model, [[1, 2]], num_beams=3, max_new_tokens=4, stop_tokens=[0, 1, 2])[0]
    assert len(few) == 3, "what ended counts as a beam"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_beams": 0}, "num_beams"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"prompts": []}, "prompts"),
        ({"stop_tokens": [5]}, "stop_tokens"),
        ({"stop_tokens": 3}, "stop_tokens must be a list"),
    ],
)
def test_a_bad_argument_is_refused_by_name(model, change, name):
    with pytest.raises(ValueError, match=name):
        beam_search(model, **{"prompts": [[1]], "num_beams": 2, "max_new_tokens": 2, **change})
