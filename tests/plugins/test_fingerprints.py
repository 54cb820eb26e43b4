"""The source that a run keeps of marked objects: definitions and their references, but no statements of a script."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.plugins.fingerprints import plugin_name, source_of

SCRIPT = '''\
"""A script."""
from __future__ import annotations

import re
import sys
from math import exp as e

import rlsdk

LIMIT = 3
OTHER = 4
PATTERN: re.Pattern[str] = re.compile("a+")
if sys.version_info > (3, 0):
    FACTOR = 2
else:
    FACTOR = 1


def helper(text):
    return bool(PATTERN.match(text)) * FACTOR


# A comment above a mark is not a statement.
@rlsdk.reward("mine")
def mine(rollout, *, limit=LIMIT):
    # A comment inside stays.
    local = [OTHER for OTHER in range(2)]
    return helper(rollout.response) * len(local) + e(limit)


@rlsdk.reward("second")
def second(rollout):
    return 0.5


print("a side effect")
if __name__ == "__main__":
    LIMIT = 100
    raise SystemExit("the script was run again")
'''


def module_of(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a script as a module of its own."""
    path.write_text(text)
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, path.stem, module)
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return module_of(tmp_path / "my-script.py", SCRIPT, monkeypatch)


def test_only_what_an_object_refers_to_is_kept(script: Any) -> None:
    text = source_of([script.mine])
    for part in (
        "import re",
        "from math import exp as e",
        "LIMIT = 3",
        "FACTOR = 2",
        "def helper",
        "# A comment inside",
    ):
        assert part in text
    for part in ("second", "side effect", "SystemExit", "A script"):
        assert part not in text


def test_the_kept_source_is_a_plugin_that_does_the_same(script: Any, tmp_path: Path) -> None:
    file = tmp_path / "kept.py"
    file.write_text(source_of([script.second, script.mine]))
    plugins = rlsdk.Plugins([file])
    assert plugins.names("reward", "kept") == ["mine", "second"]
    rollout = rlsdk.Rollout.from_text(rlsdk.Task(id="1", prompt="?"), "aaa")
    kept = plugins.bind(plugins.find("reward", "kept/mine")[1], {"limit": 0})
    assert kept(rollout) == script.mine(rollout, limit=0) == 5.0


def test_the_order_of_the_objects_does_not_matter(script: Any) -> None:
    assert source_of([script.mine, script.second]) == source_of([script.second, script.mine])


def test_an_invalid_identifier_becomes_a_valid_one(script: Any) -> None:
    assert plugin_name(script.mine) == "my_script"


def test_an_object_of_a_function_or_without_a_file_has_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    @rlsdk.reward("inner")
    def inner(rollout):
        return 1.0

    assert plugin_name(inner) is None
    typed = types.ModuleType("typed")
    monkeypatch.setitem(sys.modules, "typed", typed)
    exec("import rlsdk\n@rlsdk.reward('x')\ndef x(rollout): return 1.0", typed.__dict__)
    assert plugin_name(typed.x) is None


def test_relative_imports_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "__init__.py").write_text("")
    (tmp_path / "mypkg" / "words.py").write_text("WORD = 'a'\n")
    text = "import rlsdk\nfrom .words import WORD\n@rlsdk.reward('x')\ndef x(rollout): return WORD\n"
    (tmp_path / "mypkg" / "mine.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    from mypkg.mine import x  # type: ignore[import-not-found]

    assert "from mypkg.words import WORD" in source_of([x])
    for name in ("mypkg", "mypkg.mine", "mypkg.words"):
        monkeypatch.delitem(sys.modules, name)


def notebook(cells: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run cells as IPython does: in a module without a file, which lists them in `In`."""
    module = types.ModuleType("cells")
    monkeypatch.setitem(sys.modules, "cells", module)
    vars(module)["In"] = ["", *cells]
    for cell in cells:
        exec(cell, module.__dict__)
    return module


MARKED = "import rlsdk\n@rlsdk.reward('x')\ndef x(rollout):\n    return helper() + LIMIT\n"


def test_of_a_notebook_the_last_definition_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = ["LIMIT = 1", "def helper(): return 1", MARKED, "def helper(): return 2", "LIMIT = 5", "print('no')"]
    text = source_of([notebook(cells, monkeypatch).x])
    assert "return 2" in text and "return 1" not in text
    assert "LIMIT = 5" in text and "LIMIT = 1" not in text
    assert "print" not in text


def test_a_cell_that_is_run_again_without_a_change_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = ["LIMIT = 1", "def helper(): return 1", MARKED]
    once = source_of([notebook(cells, monkeypatch).x])
    again = source_of([notebook([*cells, cells[1], cells[0], MARKED], monkeypatch).x])
    assert once == again


def test_a_cell_with_a_syntax_error_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    module = notebook(["LIMIT = 1", "def helper(): return 1", MARKED], monkeypatch)
    vars(module)["In"].append("def broken(:")
    assert "def x(rollout)" in source_of([module.x])
