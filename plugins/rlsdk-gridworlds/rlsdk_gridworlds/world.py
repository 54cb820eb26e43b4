"""Base of all grid worlds, with options, texts, action parsing, step counts and metrics."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping
from random import Random
from typing import ClassVar, Literal, Protocol, runtime_checkable

import attrs
import numpy as np

from rlsdk.errors import ValueFault
from rlsdk.kit import PATTERN, ActionPattern
from rlsdk.types import Image, Observation, Step
from rlsdk_gridworlds.picture import SHOWN, draw, to_png

THINK_PATTERN = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
FORM = "<answer> [your answer] </answer>"
THINK_FORM = "<think> [your thoughts] </think> <answer> [your answer] </answer>"
Cells = list[list[int]]
"""Grid, row by row; its numbers are the keys of `GridWorld.CELLS`."""


@attrs.frozen
class Outcome:
    """Result of an action.

    Attributes:
        reward: Reward of the action.
        note: Description of the result for the player.
        effective: True if the action changed the state.
        solved: True if the level is solved.
        over: True if the level is solved or lost.
    """

    reward: float
    note: str
    effective: bool
    solved: bool = False
    over: bool = False


class World(Protocol):
    """A level in play."""

    def act(self, action: int) -> Outcome:
        """Take an action, a key of `action_lookup`."""
        ...

    def cells(self) -> Cells:
        """Return the current grid."""
        ...


@runtime_checkable
class Guide(Protocol):
    """A world that knows the best action."""

    def best(self) -> int:
        """Return the best action now, a key of `action_lookup`."""
        ...


@attrs.define(kw_only=True, eq=False)
class GridWorld(abc.ABC):
    """A grid puzzle played as text, with ROLL's option names.

    The first observation explains the puzzle, the symbols, the actions and the answer format; later ones describe what
    happened. A text without a valid action changes nothing but costs a step; its reward is just `format_penalty`.
    Metrics are counts since `reset`.

    Attributes:
        env_instruction: Explanation of the puzzle in the first observation; by default, the rules.
        think: Require thoughts before the answer; changes the defaults of `action_pattern` and `user_prompt_format`.
        action_pattern: Regular expression for the package `regex`; its first match counts. The action is the group
            `action`, else the last group, else the whole match; it must be a name in `action_lookup`, ignoring case.
        user_prompt_format: Answer format shown in the first observation.
        added_text: Beginning of each answer, which a workflow writes for the model; texts passed to `step` may lack it.
        template: `full`, or `grid` for observations that are only the grid, for models with few tokens.
        max_steps: Maximum number of actions in an episode, including invalid ones; then it is truncated.
        max_tokens_per_step: Maximum tokens of an answer stated in the first observation; null to state none.
        format_penalty: Reward of a text without a valid action.
        grid_lookup: Symbol of each kind of cell, by number.
        grid_vocab: Meaning of each symbol in the first observation; by default, the kind of cell.
        action_lookup: Name of each action, by number.
        picture: Show the grid as a picture instead of text, for vision-language models.
    """

    NAME: ClassVar[str]
    """Name of the puzzle; variants with the same name have the same levels."""
    CELLS: ClassVar[Mapping[int, str]]
    """Number of a kind of cell -> its meaning."""
    ACTIONS: ClassVar[tuple[int, ...]]

    env_instruction: str | None = None
    think: bool = False
    action_pattern: str | None = None
    user_prompt_format: str | None = None
    added_text: str = ""
    template: Literal["full", "grid"] = "full"
    max_steps: int = 10
    max_tokens_per_step: int | None = 128
    format_penalty: float = -0.15
    grid_lookup: Mapping[int, str] = attrs.field(factory=dict)
    grid_vocab: Mapping[str, str] | None = None
    action_lookup: Mapping[int, str] = attrs.field(factory=dict)
    picture: bool = False
    _actions: ActionPattern = attrs.field(init=False, repr=False)
    _numbers: dict[str, int] = attrs.field(init=False, repr=False)
    _world: World | None = attrs.field(init=False, default=None, repr=False)
    _over: bool = attrs.field(init=False, default=False, repr=False)
    _steps: int = attrs.field(init=False, default=0, repr=False)
    _valid: int = attrs.field(init=False, default=0, repr=False)
    _effective: int = attrs.field(init=False, default=0, repr=False)

    def __attrs_post_init__(self) -> None:
        for name in ("max_steps", "max_tokens_per_step"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueFault(f"{name}: expected at least 1, got {value}")
        _complete("grid_lookup", self.grid_lookup, tuple(self.CELLS))
        _complete("action_lookup", self.action_lookup, self.ACTIONS)
        unexplained = [s for s in self.grid_lookup.values() if self.grid_vocab is not None and s not in self.grid_vocab]
        if unexplained:
            raise ValueFault(
                f"grid_vocab: the symbols {', '.join(map(repr, unexplained))} of grid_lookup are missing; add them, or "
                "omit grid_vocab"
            )
        self._numbers = {name.strip().casefold(): number for number, name in self.action_lookup.items()}
        pattern = self.action_pattern or (THINK_PATTERN if self.think else PATTERN)
        self._actions = ActionPattern(pattern, self.added_text)

    @property
    def shows_images(self) -> bool:
        """True if observations contain pictures."""
        return self.picture

    @abc.abstractmethod
    def make(self, random: Random) -> World:
        """Create a level; all its randomness comes from `random`."""

    @abc.abstractmethod
    def rules(self) -> str:
        """Return the rules in a sentence or two."""

    def reset(self, seed: int) -> Observation:
        """Start the level of a seed, the same in every process."""
        self._world = self.make(Random(f"{self.NAME}/{seed}"))
        self._steps = self._valid = self._effective = 0
        self._over = False
        return self._observation(self._introduction())

    def step(self, text: str) -> Step:
        """Take an action.

        Raises:
            ValueFault: The episode is over, or none was started.
        """
        world = self._playing()
        action = self._numbers.get((self._actions.find(text) or "").casefold())
        outcome = self._invalid() if action is None else world.act(action)
        self._steps += 1
        self._valid += action is not None
        self._effective += outcome.effective
        truncated = not outcome.over and self._steps >= self.max_steps
        left = "" if outcome.over else f" Actions left: {self.max_steps - self._steps}."
        observation = self._observation(outcome.note + left)
        self._over = outcome.over or truncated
        return Step(observation, outcome.reward, outcome.over, truncated, self._metrics(outcome.solved))

    def expert(self) -> str:
        """Return an answer with the best action, as a demonstration; the state does not change.

        Raises:
            ValueFault: The episode is over or was not started, or the puzzle has no expert.
        """
        world = self._playing()
        if not isinstance(world, Guide):
            raise ValueFault(f"{self.NAME} has no expert; demonstrations exist for puzzles whose world has best()")
        return self._answer(world.best())

    def answers(self) -> list[str]:
        """Return an answer for each action, in the required form.

        Raises:
            ValueFault: `action_pattern` does not match the action in that form.
        """
        return [self._answer(action) for action in self.ACTIONS]

    def render(self, mode: Literal["text", "rgb_array"] = "text") -> str | np.ndarray:
        """Draw the level in its current state.

        Args:
            mode: `text`, or `rgb_array` for a picture.

        Returns:
            The grid as the model sees it, or uint8 `[height, width, 3]`.

        Raises:
            ValueFault: No episode was started, or the mode is unknown.
        """
        if mode not in ("text", "rgb_array"):
            raise ValueFault(f"render mode {mode!r}; expected 'text' or 'rgb_array'")
        if self._world is None:
            raise ValueFault("there is no level yet; call reset(seed) first")
        cells = self._world.cells()
        return self._text(cells) if mode == "text" else draw([[self.CELLS[cell] for cell in row] for row in cells])

    def _playing(self) -> World:
        if self._world is None:
            raise ValueFault("there is no level yet; call reset(seed) before step")
        if self._over:
            raise ValueFault("the episode is over; call reset(seed) before step")
        return self._world

    def _invalid(self) -> Outcome:
        names = ", ".join(self.action_lookup.values())
        note = f"That was no valid answer, and nothing happened. Answer in the form {self._form()} with one of {names}."
        return Outcome(self.format_penalty, note, effective=False)

    def _metrics(self, solved: bool) -> dict[str, float]:
        return {
            "success": float(solved),
            "num_actions": float(self._steps),
            "valid_actions": float(self._valid),
            "effective_actions": float(self._effective),
        }

    def _observation(self, words: str) -> Observation:
        assert self._world is not None
        cells = self._world.cells()
        state = "/".join("".join(map(str, row)) for row in cells)
        if self.picture:
            drawn = draw([[self.CELLS[cell] for cell in row] for row in cells])
            return Observation("" if self.template == "grid" else words, state, Image(to_png(drawn)))
        grid = self._text(cells)
        return Observation(grid if self.template == "grid" else f"{words}\n{grid}", state)

    def _text(self, cells: Cells) -> str:
        return "\n".join("".join(self.grid_lookup[cell] for cell in row) for row in cells)

    def _answer(self, action: int) -> str:
        name = self.action_lookup[action]
        text = self._form().replace("[your answer]", name).replace("[your thoughts]", "")
        if (self._actions.find(text) or "").casefold() != name.strip().casefold():
            raise ValueFault(
                f"action_pattern does not find the action {name!r} in {text!r}: user_prompt_format must contain "
                "'[your answer]' where action_pattern matches it"
            )
        return text

    def _form(self) -> str:
        return self.user_prompt_format or (THINK_FORM if self.think else FORM)

    def _introduction(self) -> str:
        vocabulary = self.grid_vocab or {symbol: self.CELLS[cell] for cell, symbol in self.grid_lookup.items()}
        symbols = ", ".join(f"{symbol} {meaning}" for symbol, meaning in vocabulary.items())
        tokens = self.max_tokens_per_step
        lines = [
            self.rules() if self.env_instruction is None else self.env_instruction,
            f"The picture shows the grid: {_legend(self.CELLS.values())}." if self.picture else f"Symbols: {symbols}.",
            f"Actions: {', '.join(self.action_lookup.values())}.",
            f"Answer with one action in the form {self._form()} and nothing else"
            + (f", in at most {tokens} tokens." if tokens else "."),
            f"Actions left: {self.max_steps}.",
        ]
        return "\n".join(line for line in lines if line)


def _legend(kinds: Collection[str]) -> str:
    return ", ".join(f"{kind} {shown}" for kind, shown in SHOWN.items() if kind in kinds)


def _complete(option: str, given: Mapping[int, str], wanted: tuple[int, ...]) -> None:
    """Reject a table with missing or extra numbers, or with duplicate names."""
    names = [name.strip().casefold() if option == "action_lookup" else name for name in given.values()]
    if set(given) != set(wanted) or len(set(names)) < len(names) or not all(names):
        raise ValueFault(f"{option}: expected different names for {', '.join(map(str, wanted))}; got {dict(given)}")
