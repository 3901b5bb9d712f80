"""RULER's tasks: prompts as the benchmark's, answers that a reader finds, lengths that are kept."""

import ast
import json
import re
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from mezzo_core.data.tokenizers import ByteTokenizer
from mezzo_core.errors import UserError
from mezzo_core.eval.ruler import TASKS, Found, measure_ruler, questions, score
from mezzo_core.nn import AttentionConfig, LMConfig
from mezzo_core.nn.checkpoint import save_model

LENGTH = 9000
BYTES = ByteTokenizer()


def asked(name, count=3, length=LENGTH, seed=42):
    return list(questions(TASKS[name], BYTES, length, count, seed))


def solve_needles(prompt):
    """Read the needles, then the keys of the question."""
    values = {}
    for key, value in re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", prompt):
        values.setdefault(key, []).append(value)
    keys = re.search(r"for ((?:(?! for ).)*) mentioned in the provided text (?:is|are)$", prompt)[1]
    return [value for key in re.split(r", and |, ", keys) for value in values[key]]


def solve_chain(prompt):
    text = prompt.rpartition("Memorize and track")[2]
    wanted = re.search(r"assigned the value (\d+) in the text", text)[1]
    assigned = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text))
    has = {wanted}
    while grown := {name for name, value in assigned.items() if value in has} - has:
        has |= grown
    return has - {wanted}


def solve_common(prompt):
    listed = prompt.rpartition("Below is a numbered list")[2].partition("\nQuestion")[0]
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", listed))
    return [word for word, _ in counts.most_common(10)]


def solve_frequent(prompt):
    text = prompt.partition("coded words. ")[2].partition("\nQuestion")[0]
    counts = Counter(word for word in text.split() if word != "...")
    return [word for word, _ in counts.most_common(3)]


SOLVERS = {"ruler_vt": solve_chain, "ruler_cwe": solve_common, "ruler_fwe": solve_frequent}


@pytest.mark.parametrize("name", TASKS)
def test_whoever_reads_the_prompt_finds_the_answers(name):
    for _, (prompt, answers) in asked(name):
        found = SOLVERS.get(name, solve_needles)(prompt)
        assert sorted(found) == sorted(answers)


@pytest.mark.parametrize(("name", "count"), [("multivalue", 4), ("multiquery", 4), ("single_3", 1)])
def test_as_many_values_are_asked_for_as_the_task_says(name, count):
    assert all(len(its.answers) == count for _, its in asked(f"ruler_niah_{name}"))


@pytest.mark.parametrize("name", TASKS)
def test_a_prompt_and_its_answer_take_nearly_the_length_and_no_more(name):
    for length in (LENGTH, 3500):
        for tokens, question in asked(name, length=length):
            assert tokens == BYTES.encode(question.prompt)
            assert 0.85 * length < len(tokens) + TASKS[name].max_new_tokens <= length


@pytest.mark.parametrize("name", TASKS)
def test_a_question_depends_on_its_number_and_the_seed_alone(name):
    three = asked(name)
    assert asked(name, 2) == three[:2]
    assert len({prompt for _, (prompt, _) in three}) == 3
    assert asked(name, seed=1)[0] != three[0]


def test_a_length_that_is_too_short_is_one_line():
    with pytest.raises(UserError, match=r"ruler_vt needs \d+ tokens or more, got a length of 900"):
        asked("ruler_vt", length=900)


def texts_of_lm_eval(file, *names):
    """Return the texts that one of lm-eval's files of RULER gives to these names, joined."""
    folder = Path(find_spec("lm_eval").submodule_search_locations[0], "tasks", "ruler")
    given = {}
    for node in ast.parse((folder / file).read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                given[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    found = given[names[0]]
    for name in names[1:]:
        found = found[name]
    return found if isinstance(found, str) else found["template"] + found["answer_prefix"]


def assert_written_as(template, prompt, **parts):
    """The prompt is the template, with any text in the place of what is in no part."""
    for name, part in parts.items():
        template = template.replace(f"{{{name}}}", part)
    first, last = template.split("{context}")
    assert prompt.startswith(first)
    assert prompt.endswith(last)


def test_prompts_are_those_of_the_benchmark():
    """As lm-eval has them; it counts with lists of words that are not here."""
    (_, (prompt, _)), *_ = asked("ruler_vt")
    wanted = texts_of_lm_eval("vt_utils.py", "CONFIG", "variable_tracking")
    value = re.findall(r"assigned the value (\d+) in", prompt)[-1]
    assert_written_as(wanted, prompt[prompt.rindex("Memorize") :], query=value, num_v="5")
    assert prompt.count("Memorize") == 2, "a solved example comes first"
    (_, (prompt, _)), *_ = asked("ruler_cwe")
    wanted = texts_of_lm_eval("cwe_utils.py", "CONFIG")
    assert_written_as(wanted, prompt[prompt.rindex("Below is") :])
    (_, (prompt, _)), *_ = asked("ruler_fwe")
    assert_written_as(texts_of_lm_eval("fwe_utils.py", "CONFIG"), prompt)
    wanted = texts_of_lm_eval("niah_utils.py", "TEMPLATE")
    (_, (prompt, _)), *_ = asked("ruler_niah_multiquery")
    query = re.search(r"numbers for ((?:(?! for ).)*) mentioned in the provided text\?", prompt)[1]
    cue = f" The special magic numbers for {query} mentioned in the provided text are"
    assert_written_as(wanted + cue, prompt, type_needle_v="numbers", query=query)
    (_, (prompt, _)), *_ = asked("ruler_niah_multikey_3")
    query = re.search(r"uuid for (\S+) mentioned", prompt)[1]
    for words, other in (("Some", "A"), ("are all", "is"), ("are", "is")):
        wanted = wanted.replace(words, other)
    cue = f" The special magic uuid for {query} mentioned in the provided text is"
    assert_written_as(wanted + cue, prompt, type_needle_v="uuid", query=query)


def test_a_score_is_the_share_of_the_answers_that_are_named():
    assert score(" ABC, def\x00", ["abc", "DEF"]) == 1
    assert score("ab c", ["abc"]) == 0
    assert score("1234567", ["234", "8"]) == 0.5


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LMConfig(vocab_size=257, d_model=16, mixers=(AttentionConfig(head_dim=8),)).build()


def test_a_model_is_scored_by_what_it_writes(model):
    with torch.no_grad():
        model.head.weight.zero_()
        model.norm.weight.zero_()  # all tokens are as likely: the first one is taken
    task = TASKS["ruler_fwe"]
    found = measure_ruler(model, BYTES, task, length=1300, num_questions=3, segment_tokens=512)
    assert (found.score, found.length, found.questions) == (0, 1300, 3)
    assert 1100 < found.mean_length <= 1300


def test_a_model_is_asked_the_questions_of_the_seed(model, monkeypatch):
    told = []
    monkeypatch.setattr(
        "mezzo_core.eval.ruler.measure.generate",
        lambda _, prompts, **options: (told.extend(prompts), [[]] * 2)[1],
    )
    measure_ruler(model, BYTES, TASKS["ruler_fwe"], length=1300, num_questions=2, seed=7)
    assert told == [tokens for tokens, _ in asked("ruler_fwe", 2, 1300, seed=7)]
    first = ByteTokenizer()
    first.begin_tokens = (256,)
    (((begin, *tokens), question),) = questions(TASKS["ruler_fwe"], first, 1300, 1)
    assert (begin, bytes(tokens).decode()) == (256, question.prompt)


def test_the_command_measures_the_tasks_by_their_names(model, tmp_path, run_command, monkeypatch):
    config = LMConfig(vocab_size=257, d_model=16, mixers=(AttentionConfig(head_dim=8),))
    save_model(model, config, tmp_path / "model", {"tokenizer": "byte"})

    command = partial(run_command, "eval", tmp_path)
    sizes = ("--seq-len", "1300", "--limit", "2")
    code, out, err = command("--tasks", "ruler_fwe,ruler_niah_single_1", *sizes)
    assert (code, err) == (0, "asking ruler_fwe\nasking ruler_niah_single_1\n")
    found = json.loads(out)["results"]
    assert list(found) == ["ruler_fwe", "ruler_niah_single_1"]
    assert {(its["length"], its["questions"]) for its in found.values()} == {(1300, 2)}
    with monkeypatch.context() as patch:
        told = {}
        patch.setattr(
            "mezzo_core.eval.ruler.measure_ruler",
            lambda *_, **options: (told.update(options), Found(0.0, 1, 1, 1.0))[1],
        )
        command("--tasks", "ruler_fwe", "--batch-size", 3, "--segment-tokens", 64)
    assert told == {"batch_size": 3, "segment_tokens": 64}
    with monkeypatch.context() as patch:  # as a model that keeps no state does
        patch.setattr("mezzo_core.eval.ruler.measure.generate", Mock(side_effect=ValueError("no")))
        assert command("--tasks", "ruler_fwe", *sizes) == (2, "", "asking ruler_fwe\nerror: no\n")
    for words, told in (
        (("--tasks", "ruler_fwe", "--all"), "--all goes without --tasks and --longbench"),
        (("--tasks", "ruler_fwe", "--data", "x"), "--data goes without --tasks and --longbench"),
        (("--tasks", "ruler_fwe", "--sft", "x"), "--sft goes without --tasks and --longbench"),
        (("--data", "x", "--sft", "x"), "--data goes without --sft"),
        (("--limit", "2"), "--limit goes with --tasks or --longbench"),
        (("--longbench", "x", "--num-fewshot", "1"), "--num-fewshot goes with --tasks"),
    ):
        assert command(*words) == (2, "", f"error: {told}\n")
    for words, told in (  # before any task is answered
        (("ruler_fwe,ruler_fve", *sizes), "there is no task 'ruler_fve'; did you mean ruler_fwe"),
        (("ruler_fwe,ruler_cwe", *sizes), "ruler_cwe needs"),
        (("ruler_fwe", *sizes, "--longbench", tmp_path / "nowhere"), "nowhere"),
        (
            ("ruler_fwe", *sizes, "--longbench", "a", "--longbench", "b"),
            "--longbench is given more",
        ),
    ):
        code, _, err = command("--tasks", *words)
        assert (code, err.count("\n")) == (2, 1)
        assert told in err
