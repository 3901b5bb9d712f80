"""A run's folder: only what a run wrote is removed, and one run at a time writes there."""

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from mezzo_core.data import DataConfig
from mezzo_core.errors import UserError
from mezzo_core.train import folder as folder_module
from mezzo_core.train.folder import check_corpus, check_folder, claim_folder, hold_folder
from mezzo_core.train.loop import train


def content(folder):
    """Everything below a folder: links as links, files with their bytes."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
    }


def refused(config, out, **options):
    """Train where it must fail; return the one line."""
    with pytest.raises(UserError) as error:
        train(config, out, quiet=True, **options)
    line = str(error.value)
    assert "\n" not in line
    return line


def claim(out, config, fingerprint="a", *, resume=True):
    claim_folder(out, config, fingerprint, resume=resume)


def check(out, config, fingerprint="a"):
    check_folder(out, config, resume=True)
    check_corpus(out, config.data, fingerprint)


FOREIGN = ["checkpoints/step-9/weights", "model/config.json", "tensorboard/x", "log.jsonl"]
FOREIGN += ["loss.png", "corpus.json"]


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("config_json", [None, '{"name": "ours"}', "[]", "{", '{"type": "x:Y"}'])
@pytest.mark.parametrize("name", FOREIGN)
def test_what_no_run_wrote_is_refused_and_untouched(tiny, tmp_path, name, config_json, resume):
    out = tmp_path / "theirs"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("precious")
    if config_json is not None:
        (out / "config.json").write_text(config_json)
    before = content(out)
    line = refused(tiny(), out, resume=resume)
    assert str(out) in line
    assert content(out) == before


def test_a_foreign_config_alone_is_refused(tiny, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    before = content(tmp_path)
    assert "config.json is not a training run's" in refused(tiny(), tmp_path, resume=False)
    assert content(tmp_path) == before


def test_unrelated_files_stay_as_they_are(tiny, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "papers").mkdir()
    config = tiny(steps=2)
    train(config, tmp_path, quiet=True)
    train(config, tmp_path, quiet=True, resume=False)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "papers").is_dir()


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    "name", ["checkpoints", "model", "tensorboard", "log.jsonl", "config.json", ".mezzo.lock"]
)
def test_a_link_in_the_folder_is_refused_and_its_target_stays(tiny, tmp_path, name, resume):
    out, target = tmp_path / "run", tmp_path / "target"
    config = tiny()
    out.mkdir()
    claim(out, config)
    target.mkdir()
    (target / "step-7").write_text("precious")
    (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(target)
    before = content(tmp_path)
    line = refused(config, out, resume=resume)
    assert f"{out / name} is a symbolic link" in line
    assert content(tmp_path) == before


def test_the_whole_folder_may_be_a_link(tiny, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    check_folder(tmp_path / "run", tiny(), resume=True)
    with hold_folder(tmp_path / "run"):
        claim(tmp_path / "run", tiny())
    assert (tmp_path / "disk" / "config.json").is_file()


def test_links_under_the_names_of_temporary_files_lead_nowhere(tiny, tmp_path):
    target, out = tmp_path / "target", tmp_path / "run"
    target.write_text("precious")
    out.mkdir()
    for name in ("config.json.tmp", "log.tmp"):
        (out / name).symlink_to(target)
    train(tiny(steps=1), out, quiet=True)
    assert target.read_text() == "precious"


def test_a_second_run_is_told_who_holds_the_folder(tiny, tmp_path):
    with hold_folder(tmp_path):
        line = refused(tiny(), tmp_path)
    assert f"{tmp_path} is in use by another run (process {os.getpid()} on " in line
    assert not (tmp_path / "config.json").exists()
    with hold_folder(tmp_path):  # the end of the first freed it
        pass


def test_a_run_holds_its_folder_until_its_end(tiny, tmp_path):
    found = []

    def try_to_hold(_):
        with pytest.raises(UserError, match="is in use by another run"), hold_folder(tmp_path):
            found.append("no")
        found.append("yes")

    train(tiny(steps=2), tmp_path, quiet=True, on_step=try_to_hold)
    assert found == ["yes", "yes"]


def test_words_in_the_lock_reach_no_terminal(tmp_path):
    with hold_folder(tmp_path):
        (tmp_path / ".mezzo.lock").write_text("process 1 on \x1b[2Jhome")
        with pytest.raises(UserError, match="is in use by another run: "), hold_folder(tmp_path):
            pass


def test_a_failed_start_claims_nothing(tiny, tmp_path):
    good = tiny(steps=2)
    lost = replace(good, data=replace(good.data, source=str(tmp_path / "missing.txt")))
    tiny_vocabulary = replace(good, model=replace(good.model, vocab_size=200))
    for bad in (lost, tiny_vocabulary):
        refused(bad, tmp_path / "run")
        assert not (tmp_path / "run" / "config.json").exists()
    assert train(good, tmp_path / "run", quiet=True).steps == 2


def test_starting_over_removes_the_run_only_when_the_new_one_can_start(tiny, tmp_path):
    config = tiny(steps=2)
    train(config, tmp_path / "run", quiet=True)
    before = content(tmp_path / "run")
    lost = replace(config, data=replace(config.data, source=str(tmp_path / "missing.txt")))
    refused(lost, tmp_path / "run", resume=False)
    assert content(tmp_path / "run") == before


@pytest.mark.parametrize("resume", [True, False])
def test_a_file_of_the_users_in_the_models_folder_is_told_before_a_step(tiny, tmp_path, resume):
    """Saving would remove it, and a run would stop at its first checkpoint."""
    config, notes = tiny(steps=2), tmp_path / "model" / "notes.txt"
    train(config, tmp_path, quiet=True)
    notes.write_text("mine")
    before = content(tmp_path)
    line = refused(replace(config, steps=4), tmp_path, resume=resume)
    assert "it holds notes.txt; move this elsewhere" in line
    assert content(tmp_path) == before
    notes.unlink()
    assert train(replace(config, steps=4), tmp_path, quiet=True, resume=resume).steps == 4


def test_a_model_whose_checkpoints_are_gone_is_not_trained_over(tiny, tmp_path):
    config = tiny(steps=2)
    train(config, tmp_path, quiet=True)
    shutil.rmtree(tmp_path / "checkpoints")
    before = content(tmp_path)
    assert "holds a trained model, but no checkpoint" in refused(config, tmp_path)
    assert content(tmp_path) == before
    shutil.rmtree(tmp_path / "model")  # a run that was killed before its first checkpoint has none
    assert train(config, tmp_path, quiet=True).steps == 2


@pytest.mark.parametrize("resume", [True, False])
def test_what_a_kill_inside_a_write_left_is_removed(tiny, tmp_path, resume):
    train(tiny(steps=2), tmp_path, quiet=True)
    before = sorted(content(tmp_path))
    for name in ("config.json", "corpus.json", "log.jsonl", "log.csv"):
        (tmp_path / f".{name}.0123456789abcdef").write_text("{")
    train(tiny(steps=2), tmp_path, quiet=True, resume=resume)
    assert sorted(content(tmp_path)) == before


def test_starting_over_keeps_what_a_user_has_beside_the_checkpoints(tiny, tmp_path):
    train(tiny(steps=4, keep_checkpoints=1), tmp_path, quiet=True)
    notes, lost = tmp_path / "checkpoints" / "notes.txt", tmp_path / "checkpoints" / "step-3"
    notes.write_text("mine")
    lost.mkdir()
    train(tiny(steps=2, keep_checkpoints=1), tmp_path, quiet=True, resume=False)
    assert sorted(path.name for path in notes.parent.iterdir()) == ["notes.txt", "step-2"]


def test_a_changed_corpus_is_refused_until_told(tiny, tmp_path, rows_of):
    corpus, out = tmp_path / "words.txt", tmp_path / "run"
    corpus.write_text("half of the notes " * 400)
    config = tiny(steps=2)
    config = replace(config, data=replace(config.data, source=str(corpus)))
    train(config, out, quiet=True)
    corpus.write_text("half of the songs " * 400)
    longer = replace(config, steps=4)
    before = content(out)
    line = refused(longer, out)
    assert str(corpus) in line
    assert "Restore it" in line
    assert "--new-data" in line
    assert content(out) == before
    moved = replace(longer, data=replace(longer.data, tokenizer="elsewhere"))
    assert "data.tokenizer is 'byte' there" in refused(moved, out, new_data=True)
    assert train(longer, out, quiet=True, new_data=True).steps == 4
    assert train(longer, out, quiet=True).steps == 4  # now it is the run's
    assert [row["step"] for row in rows_of(out)] == [1, 2, 3, 4]


def test_without_a_checkpoint_the_corpus_may_change(tiny, tmp_path):
    config = tiny()
    claim(tmp_path, config, "another")
    train(config, tmp_path, quiet=True)
    claim(tmp_path, config, "another")
    assert "its text or its tokenizer has changed" in refused(config, tmp_path)
    train(config, tmp_path, quiet=True, resume=False)


def test_a_text_is_known_by_its_name_where_its_tokens_do_not_tell(tiny, tmp_path):
    """In the hub, in a run of before, and before a checkpoint."""
    config, checkpoint = tiny(), tmp_path / "checkpoints" / "step-1"
    claim(tmp_path, config)
    checkpoint.mkdir(parents=True)
    for source in ("moved.txt", "hub:a/b"):
        moved = replace(config, data=replace(config.data, source=source))
        with pytest.raises(UserError, match=r"data\.source is .* there"):
            check_folder(tmp_path, moved, resume=True, may_move=source != "moved.txt")
    moved = replace(config, data=replace(config.data, source="moved.txt"))
    check_folder(tmp_path, moved, resume=True, may_move=True)
    for path in (checkpoint, tmp_path / "corpus.json"):
        path.rename(tmp_path / "away")
        with pytest.raises(UserError, match=r"data\.source is .* there"):
            check_folder(tmp_path, moved, resume=True, may_move=True)
        (tmp_path / "away").rename(path)


def test_new_text_that_a_stream_cannot_go_on_with_is_not_the_run_s(tiny, tmp_path):
    """The run goes on with its own text, once that is back."""
    text, out = tmp_path / "lines.jsonl", tmp_path / "run"
    lines = [json.dumps({"text": f"half of the notes {i}"}) for i in range(300)]
    data = DataConfig(source=str(text), streaming=True)
    text.write_text("\n".join(lines))
    train(tiny(data=data, steps=20), out, quiet=True)
    before = content(out)
    text.write_text("\n".join(lines[150:]))
    longer = tiny(data=data, steps=21)
    assert "its text or its tokenizer has changed" in refused(longer, out)
    assert "is not there any more" in refused(longer, out, new_data=True)
    assert content(out) == before
    text.write_text("\n".join(lines))
    other = replace(longer, data=replace(data, validation_fraction=0.5))  # which a stream ignores
    assert train(other, out, quiet=True).steps == 21


def test_a_stream_without_text_to_train_on_removes_no_run(tiny, tmp_path):
    text, out = tmp_path / "lines.jsonl", tmp_path / "run"
    train(tiny(steps=1), out, quiet=True)
    before = content(out)
    text.write_text(json.dumps({"text": "half of the notes " * 99}))  # it is all held out
    with pytest.raises(UserError, match=r"no training text in .*--validation-data"):
        train(tiny(data=DataConfig(source=str(text), streaming=True)), out, resume=False)
    assert content(out) == before


def test_a_run_of_before_corpora_were_kept_goes_on(tiny, tmp_path):
    claim(tmp_path, tiny())
    (tmp_path / "corpus.json").unlink()
    claim(tmp_path, tiny(), "b")
    assert json.loads((tmp_path / "corpus.json").read_text()) == {"fingerprint": "b"}


@pytest.mark.parametrize(
    "text", ["[]", "{", "\x00", "[" * 10_000, '{"type": ' + "9" * 5000 + "}", ""]
)
@pytest.mark.parametrize("name", ["config.json", "corpus.json"])
def test_a_damaged_file_of_the_folder_is_named(tiny, tmp_path, name, text):
    claim(tmp_path, tiny())
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=re.escape(name)) as error:
        check(tmp_path, tiny())
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


def test_what_differs_is_shortened(tiny, tmp_path):
    claim(tmp_path, tiny())
    found = json.loads((tmp_path / "config.json").read_text())
    nested: list = []
    for _ in range(300):
        nested = [nested]
    (tmp_path / "config.json").write_text(json.dumps({**found, "seed": nested, "name": "x" * 9999}))
    with pytest.raises(UserError, match="seed is") as error:
        claim(tmp_path, tiny())
    assert len(str(error.value)) < 1000


def test_a_file_in_the_place_of_the_folder_is_one_line(tiny, tmp_path):
    (tmp_path / "run").write_text("a file")
    out = tmp_path / "run"
    assert f"{out} cannot be written: {out} is no folder" in refused(tiny(), out)


def test_a_full_disk_at_the_start_names_the_file(tiny, tmp_path, monkeypatch):
    def full(path: Path, _: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder_module, "write_whole", full)
    line = refused(tiny(), tmp_path / "run")
    assert f"No space left on device: {tmp_path / 'run' / 'config.json'}" in line
