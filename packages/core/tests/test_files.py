"""Small files: damage is named in one line, and what is written is whole."""

import os
from types import SimpleNamespace

import pytest
from filelock import FileLock
from mezzo_core.errors import UserError, printable
from mezzo_core.files import acquire, is_foreign, read_json, remove_scratch, write_whole


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"[1]", "must hold a JSON object, got list"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "cannot be read as JSON"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "-Infinity is no JSON number"),
    ],
)
def test_damaged_json_is_named(tmp_path, content, words):
    path = tmp_path / "marker.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        read_json(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_named(tmp_path):
    with pytest.raises(UserError, match="is missing"):
        read_json(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_json(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(UserError, match=r"^\S+ cannot be read: it is a pipe or a device$"):
        read_json(tmp_path / "pipe.json")  # without waiting for who writes into it


def test_a_file_is_written_whole_with_the_users_mode(tmp_path):
    path = tmp_path / "config.json"
    old = os.umask(0o022)
    try:
        write_whole(path, '{"a": 1}\n')
    finally:
        os.umask(old)
    assert read_json(path) == {"a": 1}
    assert path.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_planted_link_is_replaced_not_followed(tmp_path):
    target, path = tmp_path / "target", tmp_path / "config.json"
    target.write_text("precious")
    path.symlink_to(target)
    write_whole(path, "new")
    assert target.read_text() == "precious"
    assert path.read_text() == "new"
    assert not path.is_symlink()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "half a pair: \ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_control_characters_are_spelled_out():
    assert printable("a\x1b[31mb\x07\u202e é\xa0\n\tc") == "a\\x1b[31mb\\x07\\u202e é\xa0\n\tc"


def test_a_lock_is_released_after_its_block_and_a_file_system_without_locks_is_an_os_error(
    monkeypatch, tmp_path
):
    lock = FileLock(tmp_path / "lock")
    with acquire(lock):
        assert lock.is_locked
    assert not lock.is_locked

    def refuse(self):
        raise NotImplementedError("no flock")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    with pytest.raises(OSError, match="no flock"):
        acquire(lock)


def test_files_of_other_users_but_root_are_foreign(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000, raising=False)
    owners = {owner: is_foreign(SimpleNamespace(st_uid=owner)) for owner in (0, 1000, 1001)}
    assert owners == {0: False, 1000: False, 1001: True}


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path):
    path, left = tmp_path / "config.json", tmp_path / f".config.json.{'0a' * 8}"
    others = [path, *(tmp_path / f".{name}" for name in ("config.json", "config.json.mine", "x"))]
    for file in (*others, left, tmp_path / f".log.jsonl.{'0a' * 8}"):
        file.write_text("")
    remove_scratch(path)
    assert set(tmp_path.iterdir()) == {*others, tmp_path / f".log.jsonl.{'0a' * 8}"}
