"""A plugin of rlsdk in one file."""

from __future__ import annotations

import re
from random import Random

import attrs
import rlsdk
from rlsdk.limits import Count

LONGEST = 100
"""Characters of an action that are read."""


@rlsdk.environment("my_environment")
@attrs.define(kw_only=True)
class MyEnvironment:
    """Guess a number: each guess earns the more the nearer it is, and is told which way to go.

    Attributes:
        largest: The number is from 0 to this.
        guesses: Guesses in an episode.
    """

    largest: Count = 100
    guesses: Count = 3
    _number: int = attrs.field(init=False, default=0)
    _made: int = attrs.field(init=False, default=0)

    def reset(self, seed: int) -> rlsdk.Observation:
        """Start an episode; the same seed gives the same number."""
        self._number, self._made = Random(seed).randint(0, self.largest), 0
        return rlsdk.Observation(f"0 {self.largest}")

    def step(self, text: str) -> rlsdk.Step:
        """Read a guess: the first number in what the model wrote, which may be anything."""
        self._made += 1
        found = re.search(r"[0-9]{1,6}", text[:LONGEST])
        last = self._made >= self.guesses
        if found is None:
            return rlsdk.Step(rlsdk.Observation("?"), reward=0.0, truncated=last)
        guess = int(found[0])
        reward = max(0.0, 1.0 - abs(guess - self._number) / self.largest) / self.guesses
        way = "=" if guess == self._number else ">" if guess < self._number else "/"
        right = guess == self._number
        return rlsdk.Step(rlsdk.Observation(way), reward=reward, terminated=right, truncated=last and not right)
