import json
import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Optional, Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.config_json import MARKER, check_fields, from_json, to_json, with_defaults
from mezzo_core.errors import UserError
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.train.config import OptimConfig

HERE = __name__.partition(".")[0]


class Buildable(Protocol):
    def build(self) -> None: ...


@dataclass(frozen=True)
class Leaf:
    kind: Literal["a", "b", 3] = "a"
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must not be negative, got {self.size}")

    def build(self) -> None: ...


@dataclass(frozen=True)
class Other:
    size: int = 1

    def build(self) -> None: ...


@dataclass(frozen=True)
class Tree:
    name: str
    leaf: Leaf
    parts: tuple[Buildable, ...] = ()
    betas: tuple[float, float] = (0.9, 0.95)
    loose: tuple = ()
    path: Path | None = None
    where: str | Path = "here"
    either: float | int = 1
    rate: float = 1e-3
    flag: bool = False
    count: Optional[int] = None  # noqa: UP045 (both spellings are read)
    anything: Any = None
    derived: int = field(default=0, init=False)


@dataclass(frozen=True)
class Bounds:
    most: float | None = None
    ends: tuple[float, ...] = ()
    name: str | None = None


@dataclass
class Thawed:
    size: int = 1


def there_and_back(config):
    return from_json(json.loads(json.dumps(to_json(config))), (HERE,))


def leaf_json(**changes):
    return {**to_json(Leaf()), **changes}


def tree_json(**changes):
    return {**to_json(Tree("t", Leaf())), **changes}


def assert_refused(data, *words, allow=(HERE,)):
    with pytest.raises(UserError) as caught:
        from_json(data, allow)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


leaves = st.builds(Leaf, st.sampled_from(["a", "b", 3]), st.integers(0, 10**12))
trees = st.builds(
    Tree,
    name=st.text(),
    leaf=leaves,
    parts=st.lists(leaves | st.builds(Other, st.integers()), max_size=3).map(tuple),
    betas=st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False)),
    loose=st.lists(st.integers() | st.text() | st.none() | leaves, max_size=3).map(tuple),
    path=st.none() | st.sampled_from([Path("a/b"), Path("/"), Path()]),
    where=st.text(),
    rate=st.floats(allow_nan=False),
    flag=st.booleans(),
    count=st.none() | st.integers(),
    anything=st.none() | st.booleans() | st.integers() | st.text() | leaves,
)


@settings(max_examples=settings().max_examples // 4)
@given(config=trees)
def test_a_configuration_comes_back_equal(config):
    back = there_and_back(config)
    assert back == config
    assert [type(part) for part in back.parts] == [type(part) for part in config.parts]


def test_a_language_model_comes_back_equal():
    window = AttentionConfig(head_dim=32, window_size=16, rope_base=None, alibi="press")
    config = LMConfig(100, 64, (AttentionConfig(), window) * 2, MLPConfig("swiglu", hidden=96))
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_the_json_names_each_class_and_field():
    assert to_json(MLPConfig("swiglu")) == {
        "type": "mezzo_core.nn.mlp:MLPConfig",
        "kind": "swiglu",
        "hidden": None,
    }


def test_a_field_with_a_default_may_be_left_out():
    assert from_json({"type": leaf_json()["type"]}, (HERE,)) == Leaf()


def test_a_whole_number_is_read_as_the_float_that_a_field_asks_for():
    rate = from_json(tree_json(rate=1), (HERE,)).rate
    assert (rate, type(rate)) == (1.0, float)


def test_a_whole_number_stays_one_where_both_kinds_are_allowed():
    for value in (1, 1.0):
        assert type(there_and_back(Tree("t", Leaf(), either=value)).either) is type(value)


# --- what may be built ------------------------------------------------------------------------


def test_only_classes_of_allowed_packages_are_built():
    assert_refused(
        leaf_json(), "Leaf", f"not from an allowed package: --allow-package {HERE}", allow=()
    )
    assert_refused(leaf_json(), "Leaf", allow=(HERE[:-1],))  # a prefix is not the package
    assert_refused(leaf_json(), "Leaf", allow=(f"{HERE[:-1]}_",))
    assert_refused({"type": "subprocess:Popen", "args": "ls"}, "subprocess:Popen")
    assert_refused(tree_json(leaf={"type": "pathlib:Path"}), "config.leaf", "pathlib:Path")


@pytest.mark.parametrize("kind", ["folder", "link", "namespace", "module"])
def test_a_package_of_ours_is_never_the_current_folders(kind, tmp_path, monkeypatch):
    here, code = tmp_path / "here", "raise SystemExit('it was imported')"
    here.mkdir()
    if kind == "module":
        (here / "mezzo_new.py").write_text(code)
    else:
        target = here / "mezzo_new" if kind != "link" else tmp_path / "elsewhere"
        target.mkdir()
        (target / ("part.py" if kind == "namespace" else "__init__.py")).write_text(code)
        (target / MARKER).touch()
        if kind == "link":
            (here / "mezzo_new").symlink_to(target)
    monkeypatch.chdir(here)
    for entry in ("", str(here)):  # as notebooks have it, and `python -m`
        with monkeypatch.context() as patch:
            patch.syspath_prepend(entry)
            for type_name in ("mezzo_new:Config", "mezzo_new.part:Config"):
                assert_refused({"type": type_name}, "mezzo_new", "current folder", allow=())
    assert "mezzo_new" not in sys.modules


def test_a_package_of_ours_that_is_installed_elsewhere_is_imported(tmp_path, monkeypatch):
    (tmp_path / "site/mezzo_new").mkdir(parents=True)
    (tmp_path / "site/mezzo_new/__init__.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Config:\n    size: int"
    )
    monkeypatch.chdir(tmp_path)
    data = {"type": "mezzo_new:Config", "size": 3}
    assert_refused(data, "needs mezzo_new, which is not installed", allow=())
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert_refused(data, "not from an allowed package: --allow-package mezzo_new", allow=())
    (tmp_path / "site/mezzo_new" / MARKER).touch()
    assert "mezzo_new" not in sys.modules
    assert from_json(data).size == 3
    del sys.modules["mezzo_new"]


def test_a_class_is_named_by_the_module_that_defines_it():
    assert_refused({"type": "mezzo_core.nn:MLPConfig"}, "no frozen dataclass 'MLPConfig'")


def test_what_is_no_frozen_dataclass_is_never_called():
    assert_refused({"type": f"{__name__}:Thawed"}, "no frozen dataclass 'Thawed'")
    assert_refused({"type": f"{__name__}:there_and_back"}, "no frozen dataclass")
    assert_refused({"type": f"{__name__}:Path"}, "no frozen dataclass")


def test_an_unknown_class_or_module_shows_the_nearest():
    assert_refused({"type": f"{__name__}:Leave"}, "'Leave'", "did you mean Leaf")
    assert_refused(
        {"type": "mezzo_core.nn.mpl:MLPConfig"},
        "mezzo_core.nn.mpl",
        "mezzo_core.nn.mlp",
    )
    assert_refused({"type": "mezzo_core."}, "mezzo_core.")


# --- what does not fit ------------------------------------------------------------------------


def test_a_misspelt_field_shows_the_nearest():
    assert_refused(leaf_json(sise=1), "Leaf", "'sise'", "did you mean size")
    assert_refused(tree_json(leaf=leaf_json(knd="a")), "config.leaf", "'knd'", "kind")


def test_a_field_that_is_needed_is_named():
    data = tree_json()
    del data["name"], data["leaf"]
    assert_refused(data, "Tree needs name, leaf")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": 3}, ("config.name", "str", "3")),
        ({"leaf": "a"}, ("config.leaf", "Leaf", "'a'")),
        ({"leaf": to_json(Other())}, ("config.leaf", "Leaf", "Other")),
        ({"leaf": leaf_json(size=2.5)}, ("config.leaf.size", "int", "2.5")),
        ({"leaf": leaf_json(size=True)}, ("config.leaf.size", "int", "True")),
        ({"leaf": leaf_json(kind="c")}, ("config.leaf.kind", "'a', 'b'", "'c'")),
        ({"leaf": leaf_json(size=-1)}, ("config.leaf", "must not be negative, got -1")),
        ({"betas": [0.9]}, ("config.betas", "2 items", "1")),
        ({"betas": [0.9, "x"]}, ("config.betas[1]", "float", "'x'")),
        ({"betas": 0.9}, ("config.betas", "list")),
        ({"parts": [leaf_json(), 3]}, ("config.parts[1]", "3")),
        ({"path": 3}, ("config.path", "Path", "3")),
        ({"flag": "yes"}, ("config.flag", "bool", "'yes'")),
        ({"flag": None}, ("config.flag", "bool", "None")),
        ({"count": "many"}, ("config.count", "int", "'many'")),
        ({"derived": 3}, ("no field 'derived'",)),
        ({"where": 3}, ("config.where", "str", "Path")),
    ],
)
def test_a_value_of_another_type_is_named_by_its_place(changes, words):
    assert_refused(tree_json(**changes), *words)


@pytest.mark.parametrize("data", [None, 3, [], {}, {"type": 3}, {"kind": "a"}])
def test_what_is_no_configuration_is_refused(data):
    assert_refused(data, 'an object with a "type"')


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": 3}, "Tree.name must be str, got 3"),
        ({"leaf": Leaf}, "Tree.leaf must be Leaf"),
        ({"parts": [Leaf()]}, "Tree.parts must be a tuple"),
        ({"parts": (Leaf(), 3)}, "parts.1. must be Buildable, got 3"),
        ({"betas": (0.9, "x")}, "betas.1. must be float, got 'x'"),
        ({"count": True}, "Tree.count must be int, got True"),
        ({"rate": 10**400}, "Tree.rate is too large"),
    ],
)
def test_fields_are_checked_against_what_is_written_beside_them(changes, words):
    check_fields(Tree("t", Leaf(), rate=1))
    with pytest.raises(UserError, match=words):
        check_fields(Tree(**{"name": "t", "leaf": Leaf(), **changes}))


# --- what cannot be stored --------------------------------------------------------------------


def test_what_could_not_be_read_back_is_not_written():
    @dataclass(frozen=True)
    class Local:
        size: int = 1

    @dataclass(frozen=True)
    class Typed:
        type: str = "x"

    Typed.__qualname__ = "Typed"
    for config, word in [
        (Thawed(), "frozen"),
        ({"size": 1}, "frozen"),
        (Leaf, "frozen"),
        (Local(), "top of its module"),
        (Typed(), '"type"'),
        (Tree("t", Leaf(), anything=[1]), "Tree.anything"),
        (Tree("t", Leaf(), loose=(1, {2})), r"Tree.loose\[1\]"),
        (Tree("t", Thawed()), "Thawed"),
    ]:
        with pytest.raises(TypeError, match=word):
            to_json(config)


@pytest.mark.parametrize("clip", [math.inf, 2.0])
def test_a_number_that_json_has_not_comes_back(clip):
    described = json.loads(json.dumps(to_json(OptimConfig(clip=clip)), allow_nan=False))
    assert from_json(described) == OptimConfig(clip=clip)


@pytest.mark.parametrize("config", [Bounds(-math.inf, (1.0, math.inf), "inf"), Bounds(2.0)])
def test_it_comes_back_in_tuples_and_where_none_is_allowed_too(config):
    described = json.loads(json.dumps(to_json(config), allow_nan=False))
    assert from_json(described, (HERE,)) == config


def test_fields_of_later_versions_have_their_defaults_in_what_was_stored_before():
    config = LMConfig(17, 8, (AttentionConfig(4, qk_norm="rms"), AttentionConfig(4)))
    stored = to_json(config)
    for mixer in stored["mixers"]:
        del mixer["qk_norm"], mixer["norm_eps"]
    found = with_defaults(stored, config)
    assert found["mixers"] == to_json(replace(config, mixers=(AttentionConfig(4),) * 2))["mixers"]
    assert found | {"mixers": None} == to_json(config) | {"mixers": None}
    assert "mixers" not in stored or "qk_norm" not in stored["mixers"][0], "the given JSON stays"
    for damaged in (None, [], "text", {"mixers": 3}, {"mixers": [None]}, {"type": {}}):
        with_defaults(damaged, config)
