"""One block of a config is changed, and nothing else of it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.cli.config_text import replace_text, with_block

ROOT = Path(__file__).resolve().parents[3]
AIO = {"block_size": 4096, "backend": "uring"}


def test_a_new_block_comes_last_indented_like_the_others() -> None:
    text = '{\n    "a": 1,\n\n    "b": {"c":   2}\n}\n'
    assert with_block(text, "aio", AIO) == (
        '{\n    "a": 1,\n\n    "b": {"c":   2},\n    "aio": {"block_size": 4096, "backend": "uring"}\n}\n'
    )


def test_a_block_on_one_line_stays_on_one_with_its_other_keys() -> None:
    text = '{"aio": {"backend": "auto", "use_gds": false}, "b": 1e-3}'
    assert with_block(text, "aio", AIO) == '{"aio": {"backend": "uring", "use_gds": false, "block_size": 4096}, "b": 1e-3}'


def test_a_block_on_several_lines_stays_on_several() -> None:
    text = '{\n\t"aio": {\n\t\t"backend": "auto"\n\t},\n\t"b": 1.50\n}'
    assert with_block(text, "aio", {"backend": "uring"}) == '{\n\t"aio": {\n\t\t"backend": "uring"\n\t},\n\t"b": 1.50\n}'


def test_other_spellings_of_a_key_are_dropped() -> None:
    assert with_block('{"aio": {"thread_count": 2}}', "aio", {"intra_op_parallelism": 4}, drop=["thread_count"]) == (
        '{"aio": {"intra_op_parallelism": 4}}'
    )


@pytest.mark.parametrize("text", ["{}", "{ }", "{\n}\n"])
def test_an_empty_object_gets_the_block(text: str) -> None:
    assert json.loads(with_block(text, "aio", AIO)) == {"aio": AIO}


@pytest.mark.parametrize("text", ["[]", "1", "", "{", '{"aio": 1}', '{"aio": {}} x'])
def test_what_is_not_an_object_with_a_block_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a|Expecting|Extra data|enclosed"):
        with_block(text, "aio", AIO)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.name)
def test_only_lines_of_the_block_and_the_comma_before_it_change_in_our_configs(path: Path) -> None:
    old = path.read_text()
    new = with_block(old, "aio", AIO)
    assert json.loads(new) == json.loads(old) | {"aio": json.loads(old).get("aio", {}) | AIO}
    kept = [line for line in new.splitlines() if line in old.splitlines()]
    assert len(kept) >= len(old.splitlines()) - 2


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=6
)
_TREES = st.dictionaries(st.text(max_size=6), _VALUES | st.dictionaries(st.text(max_size=3), _VALUES, max_size=3), max_size=5)


@given(_TREES, st.sampled_from([None, 0, 2, "\t"]), st.booleans())
def test_the_result_means_the_old_object_with_the_block(tree: dict[str, Any], indent: int | str | None, there: bool) -> None:
    tree.pop("aio", None)
    if there:
        tree["aio"] = {"x": [1, {"y": "}"}]}
    new = json.loads(with_block(json.dumps(tree, indent=indent), "aio", AIO))
    assert new == {**tree, "aio": {**tree.get("aio", {}), **AIO}}
    assert list(new) == list({**tree, "aio": 0})


def test_a_file_is_replaced_whole_and_keeps_its_mode_and_its_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    file = tmp_path / "real" / "config.json"
    file.write_text("old")
    file.chmod(0o640)
    (tmp_path / "link.json").symlink_to(file)
    replace_text(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("new", 0o640)
    assert os.listdir(tmp_path / "real") == ["config.json"]


def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "the disk is bad")

    file = tmp_path / "config.json"
    file.write_text("old")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="the disk is bad"):
        replace_text(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.json"]
