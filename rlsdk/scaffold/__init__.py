"""Write the files of a new plugin from templates, for `rlsdk new`."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template

import attrs

from rlsdk.errors import ValueFault
from rlsdk.kinds import Kind
from rlsdk.plugins.discovery import discover, version
from rlsdk.runlog.folder import replace_text

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
RESERVED = frozenset({"rlsdk", "test", "tests"})
FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "train.yaml": "train.yaml",
    ".gitignore": "gitignore",
    ".github/workflows/tests.yml": "ci.yml",
}
"""File of the package -> its template."""
REQUIREMENTS = {"attrs": "attrs>=24.2", "torch": "torch>=2.9"}
INSTALL_TORCH = "      - run: pip install torch --index-url https://download.pytorch.org/whl/cpu\n"
"""CI step that installs the small build of torch before pip would choose the large one."""


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
    "sampler": NewKind(
        words="task sampler",
        is_class=True,
        usage={"more": "rollout: {sampler: $name/$name}"},
        imports=("attrs",),
        tests="import numpy as np\n\nimport rlsdk\nfrom rlsdk.testing import check_component",
    ),
    "engine": NewKind(
        words="engine", is_class=True, usage={"engine": "$name/$name"}, imports=("attrs",), tests=ACTOR_TESTS
    ),
    "learner": NewKind(
        words="learner", is_class=True, usage={"learner": "$name/$name"}, imports=("attrs",), tests=ACTOR_TESTS
    ),
    "optimizer": NewKind(
        words="optimiser",
        is_class=True,
        usage={"learner": "{use: deepspeed, lr: 1.0e-3, optimizer: $name/$name}"},
        imports=("torch",),
        tests="import torch\nfrom rlsdk.testing import check_component",
    ),
    "lr_schedule": NewKind(
        words="learning-rate schedule",
        usage={"learner": "{use: deepspeed, lr: 1.0e-3, schedule: $name/$name}"},
        tests="from rlsdk.testing import check_component",
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


def plugin_name(given: str) -> str:
    """Return the name of a plugin: its folder, the prefix of its components, and its component.

    Args:
        given: Name as typed: `-` becomes `_`, and a prefix `rlsdk-` is removed.

    Raises:
        ValueFault: The name is invalid or taken.
    """
    name = re.sub(r"^rlsdk[-_]", "", given).replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]|[a-z]", name) or keyword.iskeyword(name):
        raise ValueFault(
            f"{given!r} cannot name a plugin: expected lower-case letters, digits and underscores, a letter first, and "
            "not a keyword of Python; for example my_lab"
        )
    claims = discover().get(name)
    if claims:
        origin = claims[0].origin
        raise ValueFault(f"a plugin {name!r} is already installed ({origin}); choose another name, or uninstall it")
    spec = importlib.util.find_spec(name)
    is_module = spec is not None and spec.origin is not None  # None: a folder without code, perhaps the user's
    if name in RESERVED or name in sys.stdlib_module_names or is_module:
        raise ValueFault(f"{name!r} is the name of a Python module, which the plugin would hide; choose another name")
    return name


def package(kind: Kind, name: str) -> dict[str, str]:
    """Return the files of a package with one component: path -> text."""
    values = _values(kind, name)
    code = f'"""The plugin `{name}` of rlsdk."""\n\n{_render(f"code/{kind}.py", values)}'
    tests = _render("tests.py", values) + _render(f"tests/{kind}.py", values)
    return {
        **{path: _render(template, values) for path, template in FILES.items()},
        f"{values['module']}/__init__.py": code,
        f"{values['module']}/py.typed": "",
        f"tests/test_{name}.py": tests,
    }


def single_file(kind: Kind, name: str) -> dict[str, str]:
    """Return a plugin in one file, and a configuration that trains with it: path -> text."""
    values = _values(kind, name) | {"module": name}
    config = _render("train.yaml", values).replace("seed: 0\n", f"seed: 0\nplugins: [{name}.py]\n")
    return {
        f"{name}.py": f'"""A plugin of rlsdk in one file."""\n\n{_render(f"code/{kind}.py", values)}',
        f"{name}.yaml": config,
    }


def write(files: Mapping[str, str], folder: Path) -> None:
    """Write files below a folder.

    Raises:
        ValueFault: A file already exists; nothing is written.
        OSError: A file cannot be written; none is left.
    """
    taken = [str(folder / path) for path in files if (folder / path).exists()]
    if taken:
        raise ValueFault(f"{taken[0]} already exists; choose another name or --dir, or remove it first")
    try:
        for path, text in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_text(target, text)
    except OSError:
        for path in files:  # a repetition of the command would refuse to replace them
            (folder / path).unlink(missing_ok=True)
        raise


def _values(kind: Kind, name: str) -> dict[str, str]:
    """Return the values of the placeholders in all templates."""
    new = TEMPLATES[kind]
    symbol = "".join(part.capitalize() for part in name.split("_")) if new.is_class else name
    usage = {section: Template(text).substitute(name=name) for section, text in new.usage.items()}
    sections = {
        "tasks": TASKS,
        "reward": REWARD,
        "algorithm": ALGORITHM,
        "more": "",
        "model": "",
        "engine": "transformers",
        "learner": "{use: deepspeed, lr: 1.0e-3}",
    }
    whole = {"engine": "engine: {}", "learner": "learner: {}", "model": "model: {{path: model{}}}"}
    written = [whole.get(key, "{}").format(text) for key, text in usage.items()]
    release = re.match(r"(?!0\+)(\d+)\.(\d+)", version())
    # The public interface is stable within a minor version.
    requirement = f"rlsdk>={release[0]},<{release[1]}.{int(release[2]) + 1}" if release else "rlsdk"
    requirements = [requirement, *(REQUIREMENTS[each] for each in new.imports)]
    return {
        **sections,
        **usage,
        "name": name,
        "module": f"rlsdk_{name}",
        "distribution": f"rlsdk-{name.replace('_', '-')}",
        "symbol": symbol,
        "words": new.words,
        "summary": f"The {new.words} `{name}/{name}`.",
        "usage": "\n".join(written),
        "dependencies": ", ".join(f'"{each}"' for each in requirements),
        "install_torch": INSTALL_TORCH if "torch" in new.imports else "",
        "test_imports": new.tests,
        "max_tokens": str(new.max_tokens),
        "max_length": str(new.max_length),
    }


def _render(template: str, values: Mapping[str, str]) -> str:
    source = resources.files("rlsdk.scaffold").joinpath("templates", f"{template}.tmpl")
    return Template(source.read_text(encoding="utf-8")).substitute(values)
