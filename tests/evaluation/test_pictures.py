"""Episodes replayed for their pictures, and the models of checkpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import rlsdk
from rlsdk.components import Use
from rlsdk.errors import CheckpointError
from rlsdk.evaluation.models import draw, model_of
from rlsdk.plugins import Plugins
from rlsdk.types import Message, Observation, Rollout, Step, Task


@rlsdk.environment("counter")
@attrs.define(kw_only=True)
class Counter:
    """Counts from the seed.

    Attributes:
        shown: What is rendered: `text`, `picture`, or `nothing`.
        until: The episode ends here.
    """

    shown: str = "text"
    until: int = 9
    _at: int = attrs.field(init=False, default=0)
    _loop: Any = attrs.field(init=False, default=None)

    async def reset(self, seed: int) -> Observation:
        """Begin."""
        self._at, self._loop = seed, asyncio.get_running_loop()
        return Observation(str(self._at))

    async def step(self, text: str) -> Step:
        """Add, in the event loop in which the episode began, as a client of a server needs."""
        assert asyncio.get_running_loop() is self._loop
        self._at += int(text)
        return Step(Observation(str(self._at)), terminated=self._at >= self.until)

    def render(self) -> Any:
        """As asked for."""
        picture = np.full((4, 6, 3), self._at * 20, np.uint8)
        return {"text": f"<{self._at}>", "picture": picture, "nothing": None}[self.shown]


def played(shown: str, path: Path, *answers: str) -> Path | None:
    messages = [m for answer in answers for m in (Message("user", "?"), Message("assistant", answer))]
    rollout = Rollout(Task(id="t", prompt="x"), tuple(messages), (), (), (), ())
    return asyncio.run(draw(rollout, Use(Counter, {"shown": shown}), 3, Plugins(), path))


def test_what_is_rendered_as_text_stands_one_below_the_other(tmp_path: Path) -> None:
    file = played("text", tmp_path / "sub" / "a.b", "1", "2", "5", "1")
    assert file is not None
    assert file.read_text() == "<3>\n\n<4>\n\n<6>\n\n<11>\n"  # the episode is over before the last answer


def test_answers_that_the_prompt_shows_are_not_played(tmp_path: Path) -> None:
    shown = (Message("user", "3"), Message("assistant", "9"), Message("user", "?"))
    task = Task(id="t", prompt=shown)
    rollout = Rollout(task, (*shown, Message("assistant", "1")), (), (), (), ())
    file = asyncio.run(draw(rollout, Use(Counter, {"shown": "text"}), 3, Plugins(), tmp_path / "a"))
    assert file is not None
    assert file.read_text() == "<3>\n\n<4>\n"


def test_pictures_move(tmp_path: Path) -> None:
    from PIL import Image

    file = played("picture", tmp_path / "a", "1", "2")
    assert file == tmp_path / "a.gif"
    with Image.open(file) as picture:
        assert picture.size == (6, 4)
        found = []
        for i in range(getattr(picture, "n_frames", 1)):
            picture.seek(i)
            found.append(picture.convert("RGB").getpixel((0, 0)))
    assert found == [(60,) * 3, (80,) * 3, (120,) * 3]


def test_an_environment_that_renders_nothing_leaves_no_file(tmp_path: Path) -> None:
    assert played("nothing", tmp_path / "a", "1") is None
    assert not list(tmp_path.iterdir())


def test_a_model_is_its_own_checkpoint_and_anything_else_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with model_of(tmp_path) as folder:
        assert folder == tmp_path
    with (
        pytest.raises(CheckpointError, match="neither a run's folder, nor one of its checkpoints"),
        model_of(tmp_path / "checkpoints" / "step-3"),
    ):
        pass
