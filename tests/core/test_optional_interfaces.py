"""Optional interfaces and marks: the core treats built-in components and plugins alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

import rlsdk
from rlsdk.config import Plan, check
from rlsdk.contracts import Chat, PlaysEpisodes, memory_of
from rlsdk.contracts.optional import state_of
from rlsdk.errors import DataError, RunError, UnreachableDataError
from rlsdk.readiness.checks import examine
from rlsdk.serving.stateless import tool_parser_of
from rlsdk.tool_calls import Dialect
from rlsdk.types import Rollout, Task
from tests.rollout.codecs import chatml

SHOUTED = Dialect(lambda text: [], "Shout.")


@rlsdk.workflow("shouting")
@attrs.frozen(kw_only=True)
class Shouting:
    """Has a syntax of its own for tool calls."""

    dialect = SHOUTED

    async def run(self, task: Task, chat: Chat) -> Rollout:
        """Answer once."""
        await chat.sample()
        return chat.finish()


def double(x: int) -> int:
    """Double a number."""
    return 2 * x


@rlsdk.tasks("far", costly=lambda options: options["slow"])
def far(*, slow: bool) -> list[Task]:
    """Tasks that only another machine reaches."""
    raise UnreachableDataError("no route")


@rlsdk.shaping("counting")
@attrs.define(kw_only=True)
class Counting:
    """Counts its calls.

    Attributes:
        scale: Factor.
    """

    scale: float = 1.0
    _calls: int = attrs.field(init=False, default=0)

    def __call__(self, x: rlsdk.CreditInputs) -> Any:
        """Count."""
        self._calls += 1
        return x.rewards * self.scale

    def state(self) -> int:
        """Return the calls so far."""
        return self._calls

    def restore(self, state: int) -> None:
        """Continue from earlier calls."""
        self._calls = state


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    """Check a configuration with some keys replaced."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    whole = {"name": "t", "model": str(model), "tasks": {"train": "countdown"}, "reward": "countdown", "steps": 1}
    return lambda **keys: check({**whole, "engine": "transformers", **keys})


@pytest.mark.parametrize(
    ("workflow", "told"),
    [
        ({"use": Shouting}, SHOUTED),
        ({"use": "tools", "tools": [f"{__file__}:double"], "parser": "json"}, Dialect.named("json", "test")),
        ("single_turn", Dialect.named("hermes", "test")),
    ],
)
def test_servers_read_tool_calls_as_the_workflow_does(plan: Callable[..., Plan], workflow: Any, told: Dialect) -> None:
    assert tool_parser_of(plan(workflow=workflow), chatml()).how == told.how


@pytest.mark.parametrize(("starts", "slow", "read"), [(False, True, False), (False, False, True), (True, True, True)])
def test_costly_tasks_are_read_only_for_a_run(plan: Callable[..., Plan], starts: bool, slow: bool, read: bool) -> None:
    found = examine(plan(tasks={"train": {"use": far, "slow": slow}}), starts=starts)
    assert not [each for each in found.faults if each.path.startswith("tasks")]
    assert bool([each for each in found.warnings if each.path == "tasks.train" and "no route" in each.message]) is read


@pytest.mark.parametrize("scale", [2.0, {"from": 1.0, "to": 0.0, "over": 4}])
def test_a_memory_is_found_with_and_without_schedules(scale: float | Mapping[str, float]) -> None:
    memory = memory_of(rlsdk.load("shaping", Counting, scale=scale))
    assert memory is not None
    memory.restore(3)
    assert memory.state() == 3
    assert memory_of(rlsdk.load("shaping", "overlong", max_length=9)) is None


@rlsdk.reward("keeping")
@attrs.define
class Keeping:
    """A reward whose state is what its test wants."""

    kept: Any = None

    def __call__(self, rollout: Rollout) -> float:
        return 0.0

    def state(self) -> Any:
        if self.kept is ZeroDivisionError:
            raise self.kept("nothing was counted")
        return self.kept

    def restore(self, state: Any) -> None: ...


LOOP: list[Any] = [1]
LOOP.append(LOOP)


@pytest.mark.parametrize(
    "kept, said",
    [
        (
            {"n": 1, "means": [0.5, {3}]},
            r"cannot be saved: \['means'\]\[1\]: Object of type set is not JSON serializable",
        ),
        ({3}, "cannot be saved: Object of type set"),
        ({"of": {(1, 2): 0.5}}, r"cannot be saved: \['of'\]: keys must be str"),
        (LOOP, "cannot be saved: Circular reference"),
        (ZeroDivisionError, "failed: ZeroDivisionError: nothing was counted"),
    ],
    ids=["within", "whole", "keys", "circular", "raises"],
)
def test_a_state_that_cannot_be_saved_is_reported_with_its_place_and_its_component(kept: Any, said: str) -> None:
    made = rlsdk.load("reward", Keeping)
    made.kept = kept
    with pytest.raises(RunError, match=f"reward 'keeping' {said}") as error:
        state_of(made)
    if kept is not ZeroDivisionError:
        assert "expected plain JSON" in str(error.value)
        assert "; see Keeping (" in str(error.value) and "test_optional_interfaces.py, line" in str(error.value)


def test_a_saved_state_is_a_copy_as_a_checkpoint_gives_it_back() -> None:
    made = rlsdk.load("reward", Keeping)
    made.kept = {"seen": ("a", "b")}
    state = state_of(made)
    made.kept["seen"] = ()
    assert state == {"seen": ["a", "b"]}
    assert state_of(rlsdk.load("shaping", "overlong", max_length=9)) is None


def test_episodes_come_from_the_workflow_or_from_the_task() -> None:
    own, named = (
        rlsdk.load("workflow", "environment"),
        Task(id="a", prompt="", metadata={"environment": "x", "seed": 3}),
    )
    assert isinstance(own, PlaysEpisodes)
    assert own.episode(named) == (rlsdk.Use("x"), 3)
    with pytest.raises(DataError, match="names no environment"):
        own.episode(Task(id="b", prompt=""))
    assert not isinstance(rlsdk.load("workflow", "single_turn"), PlaysEpisodes)
