"""Built-in learning-rate schedules: constant, linear, cosine, polynomial, inverse_sqrt, wsd.

The learner multiplies its peak learning rate by their value, after its own linear warm-up. Options that they are not
given are the learner's of the same name, such as `learner.final_ratio`.
"""

from __future__ import annotations

import math
from typing import Annotated

from rlsdk.learners.options import DecayShape
from rlsdk.limits import Positive, Share, at_least
from rlsdk.marks import lr_schedule

Steps = Annotated[int, at_least(0)]
Decay = Annotated[int, at_least(1)]


@lr_schedule("constant")
def constant(step: int, steps: int) -> float:
    """The peak learning rate throughout.

    Args:
        step: Optimiser steps since the warm-up.
        steps: Optimiser steps of the run after the warm-up.
    """
    return 1.0


@lr_schedule("linear")
def linear(step: int, steps: int, *, final_ratio: Share = 0.1, decay_steps: Decay | None = None) -> float:
    """Linear decay.

    Args:
        step: Optimiser steps since the warm-up.
        steps: Optimiser steps of the run after the warm-up.
        final_ratio: Final value.
        decay_steps: Number of steps of the decay; default: all.
    """
    return 1 - (1 - final_ratio) * _progress(step, steps if decay_steps is None else decay_steps)


@lr_schedule("cosine")
def cosine(step: int, steps: int, *, final_ratio: Share = 0.1, decay_steps: Decay | None = None) -> float:
    """Decay along half a cosine wave, slow at both ends.

    Args:
        step: Optimiser steps since the warm-up.
        steps: Optimiser steps of the run after the warm-up.
        final_ratio: Final value.
        decay_steps: Number of steps of the decay; default: all.
    """
    progress = _progress(step, steps if decay_steps is None else decay_steps)
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


@lr_schedule("polynomial")
def polynomial(
    step: int,
    steps: int,
    *,
    final_ratio: Share = 0.1,
    decay_steps: Decay | None = None,
    decay_power: Positive | None = None,
) -> float:
    """Decay by a power of the share of steps that are left.

    Args:
        step: Optimiser steps since the warm-up.
        steps: Optimiser steps of the run after the warm-up.
        final_ratio: Final value.
        decay_steps: Number of steps of the decay; default: all.
        decay_power: Exponent; default: 2.
    """
    left = 1 - _progress(step, steps if decay_steps is None else decay_steps)
    power: float = left ** (2.0 if decay_power is None else decay_power)
    return final_ratio + (1 - final_ratio) * power


@lr_schedule("inverse_sqrt")
def inverse_sqrt(step: int, steps: int, *, final_ratio: Share = 0.1, warmup_steps: Steps = 0) -> float:
    """The root of the share of the warm-up in all steps so far, which halves over four times the steps.

    Args:
        step: Optimiser steps since the warm-up.
        steps: Optimiser steps of the run after the warm-up.
        final_ratio: Minimum value.
        warmup_steps: Number of optimiser steps of the warm-up.
    """
    return max(final_ratio, math.sqrt(max(warmup_steps, 1) / (step + warmup_steps + 1)))


@lr_schedule("wsd")
def wsd(
    step: int,
    steps: int,
    *,
    final_ratio: Share = 0.1,
    decay_steps: Decay | None = None,
    decay_shape: DecayShape | None = None,
    warmup_steps: Steps = 0,
) -> float:
    """Warmup-stable-decay: constant, then a decay in the last steps.

    Args:
        step: Optimiser steps since the warm-up.
        steps: Optimiser steps of the run after the warm-up.
        final_ratio: Final value.
        decay_steps: Number of steps of the decay; default: a tenth of the run.
        decay_shape: linear (the default), cosine, or sqrt (1 - √x, arXiv:2405.18392), which falls fast at first.
        warmup_steps: Number of optimiser steps of the warm-up.
    """
    length = math.ceil((steps + warmup_steps) / 10) if decay_steps is None else decay_steps
    start = max(0, steps - length)
    if decay_shape == "cosine":
        return cosine(step - start, steps - start, final_ratio=final_ratio)
    if decay_shape == "sqrt":
        return final_ratio + (1 - final_ratio) * (1 - math.sqrt(_progress(step - start, steps - start)))
    return linear(step - start, steps - start, final_ratio=final_ratio)


def _progress(step: int, steps: int) -> float:
    return min(max(step / max(steps, 1), 0.0), 1.0)
