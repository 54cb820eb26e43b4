"""`rlsdk new`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import click

from rlsdk.cli.lazy import SuggestingGroup
from rlsdk.kinds import KINDS, OTHER_NAMES, Kind

DOES: Mapping[Kind, str] = {
    "reward": "score a rollout",
    "shaping": "change rewards before advantages are computed",
    "advantage": "turn rewards into advantages",
    "policy_loss": "compute the loss of each token",
    "correction": "weight tokens that the engine sampled with other probabilities than the learner's",
    "kl": "estimate the divergence from the reference model",
    "algorithm": "combine an advantage, a loss and their defaults under one name",
    "filter": "leave groups out of training",
    "buffer": "choose which groups are trained first, or again",
    "stop": "decide when a step has enough groups",
    "workflow": "talk to the policy, and return the conversation",
    "environment": "answer the policy's actions with observations and rewards",
    "tasks": "supply tasks, such as the rows of a file",
    "sampler": "choose the order of the tasks",
    "renderer": "turn messages into tokens, as a chat template does",
    "tool_parser": "read tool calls from the text of the policy",
    "tracker": "send metrics to a service",
    "engine": "sample responses",
    "learner": "update the weights",
    "optimizer": "turn gradients into steps of the weights",
    "lr_schedule": "change the learning rate during training",
    "weight_transfer": "send weights from the learner to the engines",
    "diagnosis": "recognise a problem from the metrics of a run",
}
"""Kind -> what its components do."""


class _Kinds(SuggestingGroup):
    """The kinds as commands."""

    noun = "kind"
    other_names = OTHER_NAMES


@click.group(cls=_Kinds)
def new() -> None:
    """Create a plugin from a template: a package, or one file.

    A package is installable, has tests and a configuration that trains with it, and passes `rlsdk check`.

    Examples: `rlsdk new reward my_lab` writes the package my_lab, `rlsdk new reward my_lab.py` one file.
    """


def _write(kind: Kind, name: str, folder: Path, as_file: bool = False) -> None:
    from rlsdk.scaffold import package, plugin_name, single_file, write

    as_file = as_file or name.endswith(".py")
    name = plugin_name(name.removesuffix(".py"))
    if as_file:
        files = single_file(kind, name)
        write(files, folder)
        lines = [f"rlsdk check {name}.py", "rlsdk model new nano model", f"rlsdk train {name}.yaml"]
        if folder != Path():
            lines[0] = f"cd {folder} && {lines[0]}"
    else:
        files, folder = package(kind, name), folder / name
        if folder.exists():
            raise click.UsageError(f"{folder} already exists; choose another name or --dir, or remove it first")
        write(files, folder)
        lines = [
            f"cd {folder} && pip install -e .",
            f"rlsdk check {name}",
            "rlsdk model new nano model && rlsdk train train.yaml",
        ]
    for path in files:
        click.echo(str(folder / path))
    click.echo("\nNext:\n" + "\n".join(f"  {line}" for line in lines))


FOLDER = click.option(
    "--dir",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Parent folder.  [default: the working folder]",
)


@new.command()
@click.argument("name")
@click.option("--kind", type=click.Choice(KINDS), default="reward", show_default=True, help="Kind of the component.")
@FOLDER
def plugin(name: str, kind: Kind, folder: Path) -> None:
    """Write a package NAME with one component."""
    _write(kind, name.removesuffix(".py"), folder)


for _kind in KINDS:
    command = click.command(
        _kind,
        short_help=f"{DOES[_kind][0].upper()}{DOES[_kind][1:]}.",
        help=f"Write a package NAME with a component of the kind {_kind}: {DOES[_kind]}. "
        "NAME.py, or --file, writes one file instead.",
    )
    options = (FOLDER, click.option("--file", "as_file", is_flag=True, help="Write one file and its configuration."))
    callback = functools.partial(_write, _kind)
    for decorate in (*options, click.argument("name")):
        callback = decorate(callback)
    new.add_command(command(callback))
