"""Any environment of gymnasium, played by text."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import attrs

import rlsdk
from rlsdk.environments.actions import PATTERN, ActionPattern
from rlsdk.environments.spaces import action_of, described, parsed, written
from rlsdk.errors import EnvironmentFault, ValueFault
from rlsdk.types import Observation, Step


@rlsdk.environment("gymnasium")
@attrs.define(kw_only=True, eq=False)
class Gymnasium:
    """An environment of gymnasium: its observations written as text, its actions read from text.

    Without `actions` the text is read by the environment's action space: a whole number for Discrete, numbers apart by
    commas or spaces for Box, MultiDiscrete and MultiBinary, the text itself for Text. A text without a valid action
    does not reach the environment: its reward is `format_penalty`. Metrics are counts since `reset`, and `return`, the
    sum of the environment's own rewards; those of an episode's last step are the episode's.

    Attributes:
        id: As `gymnasium.make` takes it, such as `CartPole-v1`, or `module:Name-v0` for one that a module registers.
        kwargs: For `gymnasium.make`.
        actions: How an action is called (in any case) -> the action, such as `{Left: 0, Right: 1}`.
        action_pattern: A regular expression of the package `regex`; its first match counts. The action is the group
            `action`, else the last group, else the whole match.
        instruction: The beginning of the first observation; left out, which environment it is, what an action is, and
            in which form to answer. Empty text for none.
        template: What an observation says; `{observation}` and `{actions_left}` are filled in.
        precision: Decimals of numbers in observations.
        max_steps: Actions in an episode, invalid ones included; null leaves it to the environment's own limit.
        format_penalty: Reward of a text without a valid action.
    """

    id: str
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    actions: Mapping[str, Any] | None = None
    action_pattern: str = PATTERN
    instruction: str | None = None
    template: str = "{observation}"
    precision: int = 4
    max_steps: int | None = None
    format_penalty: float = 0.0
    _pattern: ActionPattern = attrs.field(init=False, repr=False)
    _env: Any = attrs.field(init=False, default=None, repr=False)
    _named: dict[str, Any] = attrs.field(init=False, factory=dict, repr=False)
    _shown: str = attrs.field(init=False, default="", repr=False)
    _over: bool = attrs.field(init=False, default=True, repr=False)
    _steps: int = attrs.field(init=False, default=0, repr=False)
    _valid: int = attrs.field(init=False, default=0, repr=False)
    _return: float = attrs.field(init=False, default=0.0, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueFault(f"max_steps is at least 1, got {self.max_steps}")
        names = [name.strip().casefold() for name in self.actions or {}]
        if len(set(names)) < len(names) or self.actions == {} or "" in names:
            raise ValueFault(
                f"actions gives each action a name of its own, in any case; got {dict(self.actions or {})}"
            )
        self._pattern = ActionPattern(self.action_pattern)
        gymnasium = _gymnasium()
        try:
            gymnasium.spec(self.id)
        except (gymnasium.error.Error, ImportError) as error:
            raise ValueFault(f"gymnasium has no environment {self.id!r}: {error}") from error

    def reset(self, seed: int) -> Observation:
        """Start an episode.

        Args:
            seed: Any whole number; gymnasium's are from 0 upwards, so a negative one stands for another above 2⁶².

        Raises:
            ValueFault: A value of `actions` is not an action of this environment, or its actions cannot be read from
                text.
        """
        if self._env is None:
            self._env = _gymnasium().make(self.id, **self.kwargs)
            self._named = self._table()
        value, _ = self._env.reset(seed=seed % 2**63)
        self._steps = self._valid = 0
        self._return, self._over = 0.0, False
        self._shown = written(value, self.precision)
        return self._observation(self._introduction())

    def step(self, text: str) -> Step:
        """Take the action stated in a text.

        Args:
            text: Text from the model.

        Raises:
            ValueFault: The episode is over, or was not started.
        """
        if self._over:
            raise ValueFault(f"environment {self.id!r}: no episode is under way; call reset(seed) before step")
        found, action = self._read(text)
        reward, terminated, truncated, note = self.format_penalty, False, False, ""
        if found:
            value, gained, terminated, truncated, _ = self._env.step(action)
            reward = float(gained)
            self._shown = written(value, self.precision)
            self._return += reward
        else:
            note = f"That was no valid action, and nothing happened. {self._how()}"
        self._steps += 1
        self._valid += found
        truncated = bool(truncated or (self.max_steps is not None and self._steps >= self.max_steps and not terminated))
        self._over = bool(terminated) or truncated
        metrics = {
            "num_actions": float(self._steps),
            "valid_actions": float(self._valid),
            "return": float(self._return),
        }
        return Step(self._observation(note), reward, bool(terminated), truncated, metrics)

    def render(self) -> Any:
        """Render the environment; the mode is set with `kwargs: {render_mode: rgb_array}`."""
        return None if self._env is None else self._env.render()

    def close(self) -> None:
        """Give back what the environment holds."""
        if self._env is not None:
            self._env.close()
            self._env, self._over = None, True

    def _table(self) -> dict[str, Any]:
        space = self._env.action_space
        if self.actions is None:
            described(space)  # refuses a space that cannot be read from text
            return {}
        table = {}
        for name, value in self.actions.items():
            found, action = action_of(space, value)
            if not found:
                raise ValueFault(f"actions: {name!r} is {value!r}, which is not in {self.id}'s action space {space}")
            table[name.strip().casefold()] = action
        return table

    def _read(self, text: str) -> tuple[bool, Any]:
        """Parse a text into (valid, action)."""
        named = self._pattern.find(text)
        if named is None:
            return False, None
        if self.actions is None:
            return parsed(self._env.action_space, named)
        key = named.casefold()
        return key in self._named, self._named.get(key)

    def _observation(self, words: str) -> Observation:
        left = "" if self.max_steps is None else str(self.max_steps - self._steps)
        text = self.template.replace("{actions_left}", left).replace("{observation}", self._shown)
        state = hashlib.md5(self._shown.encode(errors="surrogatepass"), usedforsecurity=False).hexdigest()
        return Observation(f"{words}\n{text}" if words else text, state)

    def _introduction(self) -> str:
        if self.instruction is not None:
            return self.instruction
        return f"You act in the environment {self.id}. {self._how()}"

    def _how(self) -> str:
        what = described(self._env.action_space) if self.actions is None else f"one of {', '.join(self.actions)}"
        form = " Answer in the form <answer> [your action] </answer>." if self.action_pattern == PATTERN else ""
        return f"An action is {what}.{form}"


def _gymnasium() -> Any:
    if importlib.util.find_spec("gymnasium") is None:
        raise EnvironmentFault(
            "environment 'gymnasium' needs the package gymnasium, which is not installed: pip install gymnasium"
        )
    import gymnasium

    return gymnasium
