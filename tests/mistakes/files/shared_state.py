import rlsdk
from rlsdk import Observation, Step


@rlsdk.environment("shared")
class Shared:
    """Guess the number; remembers guesses in a class attribute."""

    guesses = []  # noqa: RUF012 - the mistake

    def reset(self, seed: int):
        return Observation("guess")

    def step(self, action: str):
        self.guesses.append(action)
        return Step(Observation(f"{len(self.guesses)} guesses"), reward=0.0, terminated=len(self.guesses) > 3)
