"""What differs between the kinds of components in a new plugin: its tests' imports and the settings that use it."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from rlsdk.kinds import Kind

TASKS = """\
tasks:
  train:
    {use: countdown, split: train, size: 2000, numbers: 3, number_range: [1, 20], target_range: [1, 100],
     operators: "+-", template: compact}"""
REWARD = "reward: {use: length_penalty, limit: 60, unit: characters}   # rewards short answers"
ALGORITHM = "algorithm: grpo"
TORCH_TESTS = "import rlsdk\nimport torch\nfrom rlsdk.testing import check_component"
LIGHT_TESTS = "import rlsdk\nfrom rlsdk.testing import check_component"
ACTOR_TESTS = "from rlsdk.contracts import ActorSpec\nfrom rlsdk.testing import check_component"


@attrs.frozen(kw_only=True)
class NewKind:
    """How a kind is written.

    Attributes:
        words: The kind in words.
        is_class: True if the template marks a class, whose name is then in capitals.
        usage: Lines of a configuration that use the component `$plugin/$name`, by section.
        imports: Distributions that its code imports beside rlsdk.
        tests: Import lines of its tests.
        max_tokens: Most tokens of an answer in its configuration.
        max_length: Most tokens of prompt and response together.
    """

    words: str
    is_class: bool = False
    usage: Mapping[str, str]
    imports: tuple[str, ...] = ()
    tests: str = LIGHT_TESTS
    max_tokens: int = 14
    max_length: int = 32


def _part(part: str, more: str = "") -> dict[str, str]:
    """A part of an algorithm in a configuration."""
    return {"algorithm": f"algorithm: {{use: grpo, {part}{more}}}"}


TEMPLATES: Mapping[Kind, NewKind] = {
    "reward": NewKind(words="reward", usage={"reward": "reward: $name/$name"}),
    "shaping": NewKind(words="shaping", usage=_part("shaping: [$name/$name]"), imports=("torch",), tests=TORCH_TESTS),
    "advantage": NewKind(
        words="advantage", usage=_part("advantage: $name/$name"), imports=("torch",), tests=TORCH_TESTS
    ),
    "policy_loss": NewKind(
        words="policy loss", usage=_part("policy_loss: $name/$name"), imports=("torch",), tests=TORCH_TESTS
    ),
    "correction": NewKind(
        words="correction", usage=_part("correction: $name/$name"), imports=("torch",), tests=TORCH_TESTS
    ),
    "kl": NewKind(
        words="KL estimator",
        usage=_part("kl: $name/$name", ", kl_coef: 0.01"),
        imports=("torch",),
        tests="import torch\nfrom rlsdk.testing import check_component",
    ),
    "algorithm": NewKind(
        words="algorithm",
        is_class=True,
        usage={"algorithm": "algorithm: $name/$name"},
        tests="from rlsdk.testing import check_component",
    ),
    "filter": NewKind(words="filter", usage=_part("filters: [$name/$name]")),
    "buffer": NewKind(words="buffer policy", usage={"more": "rollout: {buffer: $name/$name}"}),
    "stop": NewKind(
        words="stop rule",
        usage={"more": "rollout: {stop: $name/$name}"},
        tests="from rlsdk.testing import check_component",
    ),
    "workflow": NewKind(
        words="workflow",
        is_class=True,
        usage={"more": "workflow: $name/$name"},
        imports=("attrs",),
        tests="import asyncio\n\nimport rlsdk\nfrom rlsdk.testing import check_component",
        max_tokens=8,
        max_length=48,
    ),
    "environment": NewKind(
        words="environment",
        is_class=True,
        usage={
            "tasks": "tasks:\n  train: {use: seeds, form: text, size: 2000}",
            "reward": "workflow: {use: environment, environment: $name/$name, max_turns: 3}   # it gives the reward",
        },
        imports=("attrs",),
        max_tokens=2,
    ),
    "tasks": NewKind(
        words="source of tasks",
        tests="from rlsdk.testing import check_component",
        usage={"tasks": "tasks:\n  train: {use: $name/$name, split: train, size: 2000}"},
    ),
    "engine": NewKind(
        words="engine", is_class=True, usage={"engine": "$name/$name"}, imports=("attrs",), tests=ACTOR_TESTS
    ),
    "learner": NewKind(
        words="learner", is_class=True, usage={"learner": "$name/$name"}, imports=("attrs",), tests=ACTOR_TESTS
    ),
    "tracker": NewKind(
        words="tracker",
        is_class=True,
        usage={"more": "trackers: [$name/$name]"},
        imports=("attrs",),
        tests=(
            "from pathlib import Path\n\nfrom rlsdk.contracts import Run\nfrom rlsdk.testing import check_component"
        ),
    ),
}
