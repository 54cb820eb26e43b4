"""A plugin's exception is reported with the plugin's own file and line."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.environments.local import LocalEnvBackend
from rlsdk.errors import described, place_of
from rlsdk.plugins import Plugins
from rlsdk.runlog.observers import Observers
from rlsdk.testing import run_workflow
from tests.rollout.codecs import plain

LAB = """\
import json

import rlsdk


@rlsdk.hookimpl
def rlsdk_step_end(step, metrics):
    parse("{")


def parse(text):
    return json.loads(text)


@rlsdk.workflow("broken")
async def broken(task, chat):
    return task.metadata["nothing"]


@rlsdk.environment("unlucky", isolation="ISOLATION")
class Unlucky:
    def reset(self, seed):
        raise ValueError("no such level")

    def step(self, text):
        raise NotImplementedError


@rlsdk.tracker("full")
class Full:
    def open(self, run):
        raise OSError("no space")

    def log(self, step, metrics): ...

    def close(self): ...
"""


def line_of(text: str) -> int:
    """The line of the lab that holds a text."""
    return next(number for number, line in enumerate(LAB.splitlines(), 1) if text in line)


@pytest.fixture(params=["thread"])
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Plugins:
    """The lab as a plugin of one file in the working folder."""
    (tmp_path / "lab.py").write_text(LAB.replace("ISOLATION", request.param))
    monkeypatch.chdir(tmp_path)
    plugins = Plugins()
    plugins.activate("lab.py")
    return plugins


def test_a_failed_hook_names_plugin_hook_and_line(lab: Plugins) -> None:
    observers = Observers(lab)
    observers.tell("rlsdk_step_end", step=1, metrics={})
    ((name, fate),) = observers.close().items()
    assert name == "plugin lab"
    assert fate.startswith("1 of 1 calls failed; the first: rlsdk_step_end: JSONDecodeError: Expecting property name")
    assert fate.endswith(f"(lab.py, line {line_of('json.loads')})")  # not the line of the json package


def test_a_failed_workflow_names_its_line(lab: Plugins) -> None:
    workflow = lab.resolve(lab.reference("workflow", "lab/broken"))
    [group] = run_workflow(workflow, [rlsdk.Task("a", "?")], plain(), lambda _: "")
    assert group.scores[0].reason == f"workflow failed: KeyError: 'nothing' (lab.py, line {line_of('nothing')})"


@pytest.mark.parametrize("lab", ["thread", "process"], indirect=True)
def test_a_failed_environment_names_its_line_from_any_process(lab: Plugins) -> None:
    async def fail() -> Any:
        world = LocalEnvBackend(lab).open(rlsdk.Use("lab/unlucky"), 3, 30.0)
        try:
            await world.reset()
        finally:
            world.close()

    with pytest.raises(RuntimeError) as caught:
        asyncio.run(fail())
    assert f"reset raised ValueError: no such level (lab.py, line {line_of('no such level')})" in str(caught.value)


def test_a_failed_tracker_names_its_line(lab: Plugins, tmp_path: Path) -> None:
    observers = Observers(lab)
    tracker = lab.resolve(lab.reference("tracker", "lab/full"))
    observers.open({"lab/full": tracker}, rlsdk.contracts.Run("run", tmp_path, {}, 0))
    assert observers.close_trackers() == {"lab/full": f"open: OSError: no space (lab.py, line {line_of('OSError')})"}


def test_a_syntax_error_is_placed_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SyntaxError) as caught:
        compile("x = 1\ny = (\n", str(tmp_path / "lab.py"), "exec")
    assert place_of(caught.value) == "lab.py, line 2"


def test_what_never_ran_a_plugin_has_no_place() -> None:
    assert described(ValueError("odd")) == "ValueError: odd"


@pytest.mark.parametrize(
    ("holder", "name", "ending"),
    [
        (rlsdk, "advantages", "; did you mean 'advantage'?"),
        (rlsdk.Task("a", "x"), "metadta", "; did you mean 'metadata'?"),
        (rlsdk.Task("a", "x"), "METADATA", "; did you mean 'metadata'?"),
        (rlsdk, "zzz", ")"),
        ("text", "strp", ")"),
    ],
)
def test_a_misspelt_name_of_rlsdk_is_answered_with_the_nearest(holder: object, name: str, ending: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(holder, name)
    assert described(caught.value).endswith(ending)


def test_an_assignment_to_a_frozen_value_is_answered_with_what_to_write() -> None:
    task = rlsdk.Task("a", "x")
    with pytest.raises(AttributeError) as caught:
        task.prompt += "y"  # type: ignore[misc, operator]
    assert described(caught.value).endswith(
        "; the value is frozen: assign to a name of your own, rewards = x.rewards - 1 instead of x.rewards -= 1"
    )


def test_what_a_plugin_quotes_does_not_control_a_terminal() -> None:
    error = ValueError("no number in '\x1b[2J\u202e7'\nline two")
    assert described(error) == "ValueError: no number in '\\x1b[2J\\u202e7'\nline two"
