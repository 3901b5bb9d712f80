"""Tasks of lm-eval, on files: scores are those of reading each question anew."""

import json
import random

import pytest
import torch
from lm_eval.api.instance import Instance
from mezzo_core.data.tokenizer_files import load_tokenizer
from mezzo_core.errors import UserError
from mezzo_core.hub.lm_eval import MezzoEvalLM, evaluate_tasks
from mezzo_core.nn import AttentionConfig, LMConfig, generate
from mezzo_core.nn.checkpoint import save_model
from toys.running_mean import RunningMeanConfig

ATTENTION = AttentionConfig(head_dim=32)
MIXERS = (ATTENTION, ATTENTION, RunningMeanConfig())
CONFIG = LMConfig(257, 32, mixers=MIXERS, tie_embeddings=False)
LINE = "river stone light garden winter paper bridge silver morning harbour"
WORDS = LINE.split()


@pytest.fixture(scope="module")
def lm():
    """A model that has learned what comes after a few words."""
    torch.manual_seed(0)
    lm = CONFIG.build()
    text = torch.tensor(list((LINE + "\n").encode())).repeat(40)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-2)
    for _ in range(60):
        starts = torch.randint(len(text) - 65, (8,))
        rows = torch.stack([text[start : start + 65] for start in starts])
        loss = lm.loss(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return lm.eval()


def asked(kind, *pairs):
    return [Instance(kind, {}, pair, i) for i, pair in enumerate(pairs)]


def questions():
    """Return contexts with their choices; some are shared, some empty, one in two batches."""
    generator = random.Random(0)
    pairs = []
    for i in range(6):
        context = " ".join(generator.choices(WORDS, k=3 + 4 * i))
        pairs += [(context, f" {word}") for word in generator.sample(WORDS, 4 + i % 2)]
    pairs += [("", "river"), ("", "stone light"), ("ends in a space ", "light"), ("x", "y")]
    pairs += [(" ", "river"), (" ", "stone light")]
    pairs += [("river stone light garden", " winter"), ("river stone light garden", " stone")]
    generator.shuffle(pairs)
    return pairs


def alone(lm, context, continuation):
    """Return the score of one continuation, by the whole text in one forward."""
    if context.endswith(" "):  # lm-eval gives it to the continuation
        context, continuation = context[:-1], " " + continuation
    before, tokens = list(context.encode()) or [256], list(continuation.encode())
    logits = lm(torch.tensor([before + tokens])).logits[0, len(before) - 1 : -1]
    scores = logits.double().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
    return float(scores.sum()), bool((logits.argmax(-1) == torch.tensor(tokens)).all())


@pytest.mark.parametrize("segment_tokens", [7, 2048])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_scores_are_those_of_each_text_alone(lm, batch_size, segment_tokens):
    model = MezzoEvalLM(
        lm, load_tokenizer("byte"), batch_size=batch_size, segment_tokens=segment_tokens
    )
    pairs = questions()
    found = model.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    with torch.no_grad():
        wanted = [alone(lm, *pair) for pair in pairs]
    assert [best for _, best in found] == [best for _, best in wanted]
    assert any(best for _, best in wanted)
    torch.testing.assert_close(
        torch.tensor([score for score, _ in found]),
        torch.tensor([score for score, _ in wanted]),
        rtol=1e-5,
        atol=1e-5,
    )


def test_a_context_is_read_once_for_all_of_its_choices(lm, monkeypatch):
    read = []
    hook = lm.embed.register_forward_hook(lambda _, given, __: read.append(given[0].numel()))
    model = MezzoEvalLM(lm, load_tokenizer("byte"), batch_size=8)
    context = " ".join(WORDS * 3)
    pairs = [(f"{i} {context}", f" {word}") for i in range(8) for word in WORDS[:4]]
    with monkeypatch.context() as patch:
        patch.setattr(lm, "select", lambda *_: pytest.fail("a state is copied for each choice"))
        model.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    once = sum(read)
    read.clear()
    for choice in range(4):  # the contexts of one choice each, anew
        model.loglikelihood(asked("loglikelihood", *pairs[choice::4]), disable_tqdm=True)
    hook.remove()
    assert sum(read) > 3 * once


def test_a_long_text_is_read_whole_or_in_windows(lm):
    text = " ".join(WORDS * 6)
    tokens = [256, *text.encode()]
    with torch.no_grad():
        whole = lm.loss(torch.tensor([tokens[:-1]]), torch.tensor([tokens[1:]]), reduction="sum")
        windows = [tokens[start : start + 51] for start in range(0, len(tokens) - 51, 50)]
        rest = tokens[-51:]  # the last window is as long, and counts what is left
        new = (len(tokens) - 1) % 50
        logits = lm(torch.tensor([rest[:-1]])).logits[0].log_softmax(-1)
        last = logits.gather(1, torch.tensor(rest[1:])[:, None])[-new:].sum()
        ours = [torch.tensor([window]) for window in windows]
        cut = last - sum(lm.loss(w[:, :-1], w[:, 1:], reduction="sum") for w in ours)
    requests = asked("loglikelihood_rolling", (text,), ("",), (text[:20],))
    for max_length, wanted in ((None, -whole), (50, cut)):
        model = MezzoEvalLM(lm, load_tokenizer("byte"), max_length=max_length, segment_tokens=32)
        first, empty, short = model.loglikelihood_rolling(requests, disable_tqdm=True)
        assert first == pytest.approx(float(wanted), rel=1e-5)
        assert empty == 0
        assert short == pytest.approx(alone(lm, "", text[:20])[0], rel=1e-5)


def test_generation_stops_at_its_strings_in_every_row(lm):
    model = MezzoEvalLM(lm, load_tokenizer("byte"), batch_size=2)
    prompts = ["river", "stone light ", "garden winter paper", "harbour\n"]
    requests = [(prompt, {"until": ["\n", "ver"], "max_gen_toks": 40}) for prompt in prompts]
    requests.append(("river", {"until": [], "max_gen_toks": 7}))
    found = model.generate_until(asked("generate_until", *requests), disable_tqdm=True)
    rows = generate(lm, [list(prompt.encode()) for prompt in prompts], max_new_tokens=40)
    texts = [bytes(row).decode() for row in rows]
    assert found[:4] == [text.partition("\n")[0].partition("ver")[0] for text in texts]
    assert found[4] == texts[0][:7]
    assert any("ver" in text for text in texts)
    drawn, same, hot = (
        model.generate_until(
            asked("generate_until", ("river", {"do_sample": True, "max_gen_toks": 40, **more})),
            disable_tqdm=True,
        )
        for more in ({}, {"temperature": 1.0}, {"temperature": 9.0})
    )
    assert drawn == same != hot
    sampling = {"do_sample": True, "temperature": 9.0, "max_gen_toks": 7, "until": []}
    for few in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert model.generate_until(asked("generate_until", ("river", sampling | few))) == found[4:]
    short = MezzoEvalLM(lm, load_tokenizer("byte"), max_length=12)
    longer = ("many words and then river", {"until": [], "max_gen_toks": 7})
    assert short.generate_until(asked("generate_until", longer)) == found[4:]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Write a task of each kind: choices, the last word of a text, what a model writes, a text."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "question": f"{LINE}\n{' '.join(WORDS[: i + 1])}",
            "choices": [f"{WORDS[(i + step) % 10]}" for step in (1, 3, 4, 6)],
            "answer": 0,
            "next": WORDS[i + 1],
        }
        for i in range(8)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds = {
        "choices": (
            "output_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
            "doc_to_choice: '{{choices}}'\ndoc_to_target: answer",
            ("acc", "acc_norm"),
        ),
        "cloze": (
            "output_type: loglikelihood\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{next}}'",
            ("acc", "perplexity"),
        ),
        "written": (
            "output_type: generate_until\ndoc_to_text: '{{question}} '\ndoc_to_target: '{{next}}'\n"
            "generation_kwargs: {until: [' '], max_gen_toks: 12}",
            ("exact_match",),
        ),
        "text": (
            "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{question}}'",
            ("bits_per_byte",),
        ),
    }
    for name, (lines, metrics) in kinds.items():
        listed = "".join(f"  - metric: {metric}\n" for metric in metrics)
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ntest_split: test\ndataset_kwargs:\n"
            f"  data_files: {{test: {folder}/rows.jsonl}}\n  cache_dir: {folder}/cache\n"
            f"{lines}\nmetric_list:\n{listed}"
        )
    return folder


class Anew(MezzoEvalLM):
    """Reads the context of every continuation again, one text at a time."""

    def _loglikelihood_tokens(self, requests, **settings):
        whole = super()._loglikelihood_tokens
        return [whole([request], **settings)[0] for request in requests]


def test_every_kind_of_task_has_the_scores_of_reading_anew(lm, tasks):
    names, tokenizer = ["choices", "cloze", "written", "text"], load_tokenizer("byte")
    once, anew = (
        evaluate_tasks(kind(lm, tokenizer), names, folder=tasks)["results"]
        for kind in (MezzoEvalLM, Anew)
    )
    assert once.keys() == set(names)
    assert once["choices"]["acc,none"] > 0.5
    assert once["written"]["exact_match,none"] > 0
    for name in names:
        scores = {key: score for key, score in once[name].items() if isinstance(score, float)}
        assert scores
        assert scores == pytest.approx({key: anew[name][key] for key in scores}, rel=1e-6)


def test_the_command_prints_the_scores(lm, tasks, tmp_path, run_command):
    save_model(lm, CONFIG, tmp_path / "model", {"tokenizer": "byte"})
    given = (tmp_path, "--allow-package", "toys", "--task-folder", tasks, "--limit", 2)
    told = ("--tasks", "cloze, written, ruler_fwe", "--seq-len", 1000)
    code, out, _ = run_command("eval", *given, *told)
    found = json.loads(out)
    assert code == 0
    assert found["versions"].keys() == {"cloze", "written"}
    assert found["results"].keys() == {"cloze", "written", "ruler_fwe"}, "which is mezzo's own"
    assert found["n-samples"]["cloze"]["effective"] == 2
    code, out, _ = run_command("eval", *given, "--tasks", "cloze", "--num-fewshot", 1)
    assert json.loads(out)["n-shot"] == {"cloze": 1}
    for name, words in (("clozed", "did you mean cloze"), (" , ", "--tasks must name a task")):
        code, out, err = run_command("eval", *given, "--tasks", name)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert words in err
    elsewhere = (*given[:4], tmp_path / "none", "--tasks", "ruler_fwe")
    code, out, err = run_command("eval", *elsewhere)
    assert (code, out) == (2, "")
    assert "there is no such folder" in err


def test_what_is_not_there_or_not_supported_is_one_line(lm, tasks):
    model = MezzoEvalLM(lm, load_tokenizer("byte"), max_length=4)
    with pytest.raises(UserError, match="no task 'choises'; did you mean choices"):
        evaluate_tasks(model, ["choises"], folder=tasks)
    beams = {"until": ["\n"], "num_beams": 3}
    with pytest.raises(UserError, match="num_beams, which is not supported"):
        model.generate_until(asked("generate_until", ("a", beams)))
    with pytest.raises(UserError, match=r"longer than max_length = 4 \(--seq-len\)"):
        model.loglikelihood(asked("loglikelihood", ("a", "more than four")), disable_tqdm=True)
    with pytest.raises(UserError, match="leave room for a prompt"):
        model.generate_until(asked("generate_until", ("a", {"until": [], "max_gen_toks": 4})))
