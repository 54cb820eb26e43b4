"""Draw an episode by replaying it: the same seed and answers give the same observations."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlsdk.components import Use
from rlsdk.contracts import Closes, Renders
from rlsdk.isolation.threads import Threads
from rlsdk.plugins import Plugins
from rlsdk.types import Rollout

SECONDS = 30.0
"""Time limit in seconds of a whole episode; no model is involved."""
_FRAME_MS = 500


async def draw(rollout: Rollout, environment: Use, seed: int, plugins: Plugins, path: Path) -> Path | None:
    """Replay a rollout's answers and save what the environment renders.

    Args:
        rollout: Rollout whose answers are the actions.
        environment: Environment component with its options.
        seed: Seed of the episode.
        plugins: Plugins that provide the environment.
        path: Target without a suffix: `.gif` for pictures, `.txt` for text.

    Returns:
        Path of the file; None if the environment renders nothing.
    """
    answers = [message.text for message in rollout.answers]
    made = plugins.resolve(plugins.reference("environment", environment.name, environment.options))
    if not isinstance(made, Renders):
        return None
    frames = [f for f in await Threads(1).call(_play, made, seed, answers, seconds=SECONDS) if f is not None]
    return save(frames, path) if frames else None


def _play(environment: Any, seed: int, answers: Sequence[str]) -> list[np.ndarray | str | None]:
    try:
        _done(environment.reset(seed))
        frames = [_frame(environment)]
        for answer in answers:
            step = _done(environment.step(answer))
            frames.append(_frame(environment))
            if step.terminated or step.truncated:
                break
        return frames
    finally:
        if isinstance(environment, Closes):
            _done(environment.close())


def _done(result: Any) -> Any:
    """Return the result of a call that may be async."""
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def _frame(environment: Any) -> np.ndarray | str | None:
    """Render a picture if the environment can, else text."""
    modes = "mode" in inspect.signature(environment.render).parameters
    shown = environment.render(mode="rgb_array") if modes else environment.render()
    return shown if isinstance(shown, np.ndarray | str) else None


def save(frames: Sequence[np.ndarray | str], path: Path) -> Path:
    """Save frames: pictures, uint8 `[height, width, 3]`, as an animation, texts one below another.

    Args:
        frames: Frames, all of one kind.
        path: Target without a suffix.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(frames[0], str):
        text = path.with_name(f"{path.name}.txt")
        text.write_text("\n\n".join(str(frame) for frame in frames) + "\n", encoding="utf-8")
        return text
    from PIL import Image

    pictures = [Image.fromarray(np.asarray(frame, dtype=np.uint8)) for frame in frames]
    gif = path.with_name(f"{path.name}.gif")
    pictures[0].save(gif, save_all=True, append_images=pictures[1:], duration=_FRAME_MS, loop=0)
    return gif
