"""Base of all grid worlds: options, texts, parsing of actions, step counts, metrics."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from random import Random
from typing import ClassVar, Literal, Protocol, runtime_checkable

import attrs
import numpy as np

from rlsdk.errors import ValueFault
from rlsdk.kit import PATTERN, ActionPattern
from rlsdk.types import Observation, Step
from rlsdk_gridworlds.picture import draw

THINK_PATTERN = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
FORM = "<answer> [your answer] </answer>"
THINK_FORM = "<think> [your thoughts] </think> <answer> [your answer] </answer>"
Cells = list[list[int]]
"""The grid, row by row, in the numbers of `GridWorld.CELLS`."""


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
    """A level that is being played."""

    def act(self, action: int) -> Outcome:
        """Do what the key of `action_lookup` stands for."""
        ...

    def cells(self) -> Cells:
        """The grid as it is."""
        ...


@runtime_checkable
class Guide(Protocol):
    """A world that knows what to do."""

    def best(self) -> int:
        """The key of `action_lookup` to play now."""
        ...


@attrs.define(kw_only=True, eq=False)
class GridWorld(abc.ABC):
    """A puzzle on a grid, played by text; the names of its options are those of ROLL.

    The first observation says what the puzzle is, what the symbols mean, which actions there are and in which form to
    answer; later ones say what happened. A text without a valid action changes nothing, costs a step, and its reward is
    `format_penalty` alone. Metrics are counts since `reset`; those of an episode's last step are the episode's.

    Attributes:
        env_instruction: What the first observation says of the puzzle; left out, the rules.
        think: Ask for thoughts before the answer, and demand them: another `action_pattern` and `user_prompt_format`.
        action_pattern: A regular expression of the package `regex`; its first match counts. The action is the group
            `action`, else the last group, else the whole match, and must be a name of `action_lookup` in any case.
        user_prompt_format: The form of an answer as the first observation shows it.
        added_text: With what a workflow begins each answer for the model; a text given to `step` may lack it.
        template: `full`, or `grid`: every observation is the grid and nothing else, as for a model of few tokens.
        max_steps: Actions in an episode, invalid ones included; beyond them it is truncated.
        max_tokens_per_step: Tokens of an answer, as the first observation says; null for no such sentence.
        format_penalty: Reward of a text without a valid action.
        grid_lookup: Number of a kind of cell -> how it is written.
        grid_vocab: How a cell is written -> what it means, as the first observation says; left out, what it is.
        action_lookup: Number of an action -> its name.
    """

    NAME: ClassVar[str]
    """Name of the puzzle: variants that share it have the same levels."""
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
                raise ValueFault(f"{name} is at least 1, got {value}")
        _complete("grid_lookup", self.grid_lookup, tuple(self.CELLS))
        _complete("action_lookup", self.action_lookup, self.ACTIONS)
        unexplained = [s for s in self.grid_lookup.values() if self.grid_vocab is not None and s not in self.grid_vocab]
        if unexplained:
            raise ValueFault(
                f"grid_vocab does not say what {', '.join(map(repr, unexplained))} of grid_lookup means; add it, or "
                "leave grid_vocab out"
            )
        self._numbers = {name.strip().casefold(): number for number, name in self.action_lookup.items()}
        pattern = self.action_pattern or (THINK_PATTERN if self.think else PATTERN)
        self._actions = ActionPattern(pattern, self.added_text)

    @abc.abstractmethod
    def make(self, random: Random) -> World:
        """A new level, in which everything is drawn from `random`."""

    @abc.abstractmethod
    def rules(self) -> str:
        """The rules in a sentence or two."""

    def reset(self, seed: int) -> Observation:
        """Start the level of a seed, the same in every process.

        Args:
            seed: Any whole number.
        """
        self._world = self.make(Random(f"{self.NAME}/{seed}"))
        self._steps = self._valid = self._effective = 0
        self._over = False
        return self._observation(self._introduction())

    def step(self, text: str) -> Step:
        """Take an action.

        Args:
            text: Text that the model wrote.

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
        """An answer with the best action, as a demonstration; nothing is done.

        Raises:
            ValueFault: The episode is over, or none was begun; or nobody knows the best action of this puzzle.
        """
        world = self._playing()
        if not isinstance(world, Guide):
            raise ValueFault(f"{self.NAME} has no expert; demonstrations exist for puzzles whose world has best()")
        return self._answer(world.best())

    def answers(self) -> list[str]:
        """An answer for each action, in the form that is asked for.

        Raises:
            ValueFault: `action_pattern` does not find the action in that form.
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
        grid = self._text(cells)
        return Observation(grid if self.template == "grid" else f"{words}\n{grid}", state)

    def _text(self, cells: Cells) -> str:
        return "\n".join("".join(self.grid_lookup[cell] for cell in row) for row in cells)

    def _answer(self, action: int) -> str:
        name = self.action_lookup[action]
        text = self._form().replace("[your answer]", name).replace("[your thoughts]", "")
        if (self._actions.find(text) or "").casefold() != name.strip().casefold():
            raise ValueFault(
                f"the action {name!r} is not found in {text!r}: user_prompt_format must hold '[your answer]' where "
                "action_pattern looks for it"
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
            f"Symbols: {symbols}.",
            f"Actions: {', '.join(self.action_lookup.values())}.",
            f"Answer with one action in the form {self._form()} and nothing else"
            + (f", in at most {tokens} tokens." if tokens else "."),
            f"Actions left: {self.max_steps}.",
        ]
        return "\n".join(line for line in lines if line)


def _complete(option: str, given: Mapping[int, str], wanted: tuple[int, ...]) -> None:
    """Refuse a table that lacks a number, has one too many, or says the same of two."""
    names = [name.strip().casefold() if option == "action_lookup" else name for name in given.values()]
    if set(given) != set(wanted) or len(set(names)) < len(names) or not all(names):
        raise ValueFault(f"{option} gives each of {', '.join(map(str, wanted))} a name of its own; got {dict(given)}")
