"""Parts of a new plugin's files that depend on its component's kind: imports of tests, settings that use it."""

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
    """Kind-specific parts of a new plugin.

    Attributes:
        words: Name of the kind in prose.
        is_class: True if the component is a class, named in CapWords.
        usage: Configuration lines, by section, that use the component `$name/$name`.
        imports: Distributions, besides rlsdk, that its code imports.
        tests: Import lines of its tests.
        max_tokens: `sampling.max_tokens` of its configuration.
        max_length: `model.max_length` of its configuration.
    """

    words: str
    is_class: bool = False
    usage: Mapping[str, str]
    imports: tuple[str, ...] = ()
    tests: str = LIGHT_TESTS
    max_tokens: int = 14
    max_length: int = 32


def _part(part: str, more: str = "") -> dict[str, str]:
    """Return the usage of a part of an algorithm."""
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
        imports=("torch",),  # its parts use torch
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
    "renderer": NewKind(
        words="renderer",
        is_class=True,
        usage={"model": ", renderer: $name/$name"},
        imports=("attrs",),
        tests="from rlsdk.testing import check_component",
    ),
    "tool_parser": NewKind(
        words="parser of tool calls",
        is_class=True,
        usage={"model": ", tool_parser: $name/$name"},
        tests="from rlsdk.contracts import Call, Malformed\nfrom rlsdk.testing import check_component",
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
    "diagnosis": NewKind(
        words="diagnosis",
        usage={"more": "diagnoses: [builtin, $name/$name]"},
        tests="from rlsdk.contracts import History\nfrom rlsdk.testing import check_component",
    ),
    "weight_transfer": NewKind(
        words="weight transfer",
        is_class=True,
        usage={"more": "rollout: {weight_transfer: $name/$name}"},
        imports=("attrs",),
        tests=(
            "import numpy as np\nimport pytest\nfrom rlsdk.contracts import Weights\n"
            "from rlsdk.testing import check_component"
        ),
    ),
}
