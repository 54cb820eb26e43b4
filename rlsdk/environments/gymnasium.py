"""Gymnasium environments played through text: observations are formatted as text, actions are parsed from it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

import rlsdk
from rlsdk.errors import EnvironmentFault, ValueFault
from rlsdk.types import Observation, Step

PATTERN = r"<answer>(.*?)</answer>"
"""Default pattern of an action in an answer."""
LONGEST = 100_000
"""Maximum number of characters to search, since the time of a search is quadratic in it."""
SECONDS = 1.0
"""Time limit of a search; one that takes longer finds nothing."""


@attrs.frozen
class ActionPattern:
    """Finds the action in a model's text.

    Attributes:
        pattern: Regular expression of the package `regex`; the dot also matches line breaks. The action is the group
            `action` of the first match, else its last group, else the whole match.
        opening: Prefill: text written by the environment that the model's answer continues.
    """

    pattern: str = PATTERN
    opening: str = ""
    _compiled: Any = attrs.field(default=None, init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        import regex

        try:
            object.__setattr__(self, "_compiled", regex.compile(self.pattern, regex.DOTALL))
        except regex.error as error:
            raise ValueFault(f"action_pattern {self.pattern!r} is not a regular expression: {error}") from error

    def find(self, text: str) -> str | None:
        """Extract the action, stripped of surrounding space; None if there is none."""
        for whole in (text, self.opening + text) if self.opening else (text,):
            if len(whole) > LONGEST:
                continue
            try:
                match = self._compiled.search(whole, timeout=SECONDS)
            except TimeoutError:
                continue
            group = "action" if "action" in self._compiled.groupindex else self._compiled.groups
            if match is not None and match[group] is not None:
                return str(match[group]).strip()
        return None


_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
_LONGEST = 10_000
"""Maximum characters of an action; longer texts are invalid."""
_DIGITS = 40


@rlsdk.environment("gymnasium")
@attrs.define(kw_only=True, eq=False)
class Gymnasium:
    """A gymnasium environment whose observations are formatted as text and whose actions are parsed from text.

    Without `actions`, the environment's action space determines how text is parsed: a whole number for Discrete,
    numbers separated by commas or spaces for Box, MultiDiscrete and MultiBinary, the text itself for Text. Text without
    a valid action does not reach the environment; its reward is `format_penalty`. Metrics: the numbers of actions and
    of valid actions since `reset`, and `return`, the sum of the environment's own rewards.

    Attributes:
        id: Id for `gymnasium.make`, such as `CartPole-v1`, or `module:Name-v0` for one registered by a module, which
            must be installed or on PYTHONPATH.
        kwargs: Additional arguments of `gymnasium.make`.
        actions: Case-insensitive name -> action, such as `{Left: 0, Right: 1}`.
        action_pattern: Regular expression of the package `regex`; its first match counts. The action is the group
            `action`, else the last group, else the whole match.
        instruction: Beginning of the first observation; by default, it names the environment and explains the actions
            and the format of answers. Empty for none.
        template: Text of an observation; `{observation}` and `{actions_left}` are replaced.
        precision: Number of decimals in observations.
        max_steps: Maximum actions in an episode, including invalid ones; null leaves the environment's own limit.
        format_penalty: Reward of text without a valid action.
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
            raise ValueFault(f"max_steps: expected at least 1, got {self.max_steps}")
        names = [name.strip().casefold() for name in self.actions or {}]
        if len(set(names)) < len(names) or self.actions == {} or "" in names:
            raise ValueFault(f"actions: expected names that differ in more than case; got {dict(self.actions or {})}")
        self._pattern = ActionPattern(self.action_pattern)
        gymnasium = _gymnasium()
        module, _, name = self.id.rpartition(":")
        try:
            if module:
                importlib.import_module(module)
            gymnasium.spec(name)
        except (gymnasium.error.Error, ImportError) as error:
            said = str(error).rstrip(".")
            raise ValueFault(
                f"gymnasium has no environment {self.id!r}: {said}. gymnasium.pprint_registry() lists those that are "
                "installed; one that another package registers is named MODULE:ID"
            ) from error

    def reset(self, seed: int) -> Observation:
        """Start an episode.

        Args:
            seed: Any whole number; gymnasium requires at least 0, so it is taken modulo 2⁶³.

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
        introduction = self.instruction
        if introduction is None:
            introduction = f"You act in the environment {self.id}. {self._how()}"
        return self._observation(introduction)

    def step(self, text: str) -> Step:
        """Take the action stated in a text.

        Raises:
            ValueFault: No episode is in progress.
        """
        if self._over:
            raise ValueFault(f"environment {self.id!r}: no episode is in progress; call reset(seed) before step")
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
        """Close the environment and release its resources."""
        if self._env is not None:
            self._env.close()
            self._env, self._over = None, True

    def _table(self) -> dict[str, Any]:
        """Return the action of each name in `actions`, names in lower case."""
        space = self._env.action_space
        if self.actions is None:
            described(space)  # raises for a space that cannot be parsed from text
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


def written(value: Any, precision: int) -> str:
    """Format an observation as text: numbers with few decimals, mappings with a line per key."""
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {written(each, precision)}" for key, each in value.items())
    if isinstance(value, tuple):
        return ", ".join(written(each, precision) for each in value)
    if isinstance(value, str):
        return value
    array = np.asarray(value)
    if array.dtype.kind == "f":
        array = np.round(array.astype(np.float64), precision) + 0.0  # no -0.0
    return str(array.tolist())


def described(space: Any) -> str:
    """Describe the actions of a space in words.

    Raises:
        ValueFault: Actions of this kind of space cannot be read from text.
    """
    kind = _kind(space)
    if kind == "Discrete":
        return f"a whole number from {int(space.start)} to {int(space.start + space.n - 1)}"
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    count = int(np.prod(space.shape))
    if kind == "Box":
        low, high = (written(np.ravel(side)[0], 4) for side in (space.low, space.high))
        same = len(set(np.ravel(space.low))) == len(set(np.ravel(space.high))) == 1
        return f"{_numbers(count, 'number')}" + (f" from {low} to {high}" if same else "")
    if kind == "MultiBinary":
        return f"{_numbers(count, 'number')}, each 0 or 1"
    least = np.ravel(space.start)
    ranges = ", ".join(f"{low} to {low + n - 1}" for low, n in zip(least, np.ravel(space.nvec), strict=True))
    return f"{_numbers(count, 'whole number')}, from {ranges}"


def parsed(space: Any, text: str) -> tuple[bool, Any]:
    """Parse a text into (valid, action) for an action space."""
    if len(text) > _LONGEST:
        return False, None
    if _kind(space) == "Text":
        return action_of(space, text)
    tokens = re.split(r"[,\s]+", text.strip().strip("[]()").strip())
    if not all(len(token) <= _DIGITS and _NUMBER.fullmatch(token) for token in tokens):
        return False, None
    values = [float(token) for token in tokens]
    if _kind(space) == "Discrete":
        return action_of(space, values[0]) if len(values) == 1 else (False, None)
    return action_of(space, values)


def action_of(space: Any, value: Any) -> tuple[bool, Any]:
    """Convert a plain value (as in YAML) into (valid, action), with the action in the space's own type.

    Args:
        space: Any space.
        value: A number, a list of numbers, or a value the space accepts as is.
    """
    kind = type(space).__name__
    if kind == "Discrete":
        whole = isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer()
        return (whole and bool(space.contains(int(value))), int(value) if whole else None)
    if kind not in ("Box", "MultiDiscrete", "MultiBinary"):
        return bool(space.contains(value)), value
    try:
        given = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return False, None
    if given.size != np.prod(space.shape) or not np.isfinite(given).all():
        return False, None
    given = given.reshape(space.shape)
    if np.issubdtype(space.dtype, np.integer):
        limits = np.iinfo(space.dtype)
        if ((given != np.round(given)) | (given < limits.min) | (given > limits.max)).any():
            return False, None
    with np.errstate(over="ignore"):
        action = given.astype(space.dtype)
    return bool(np.isfinite(action).all() and space.contains(action)), action


def _kind(space: Any) -> str:
    kind = type(space).__name__
    if kind not in ("Discrete", "Box", "MultiDiscrete", "MultiBinary", "Text"):
        raise ValueFault(
            f"actions of the space {space} cannot be read from text; give them names: actions: {{NAME: ACTION, …}}"
        )
    return kind


def _numbers(count: int, what: str) -> str:
    return f"a {what}" if count == 1 else f"{count} {what}s separated by commas"
