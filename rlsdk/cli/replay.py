"""`rlsdk replay`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from rlsdk.cli.parameters import FiniteRange, SettingsCommand, json_output, plugin_files
from rlsdk.errors import ArgumentError
from rlsdk.plurals import counted
from rlsdk.replay.files import FRAMEWORKS


@click.command(cls=SettingsCommand)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("settings", metavar="[algorithm.KEY=VALUE]...", nargs=-1)
@click.option("--algorithm", metavar="ALGORITHM", help="Algorithm to compute with.  [default: grpo]")
@click.option(
    "--from",
    "framework",
    type=click.Choice(FRAMEWORKS, case_sensitive=False),
    help="Trainer that wrote FILE.  [default: detected from field names]",
)
@click.option("--reward", "rewards", metavar="COLUMN", multiple=True, help="Reward column; repeat for a sum.")
@click.option(
    "--group-size", type=click.IntRange(1), metavar="N", help="Rollouts per group, if groups are consecutive."
)
@click.option("--checkpoint", metavar="DIR", help="Also compute logprobs and weight gradients with this model.")
@click.option(
    "--tolerance",
    type=FiniteRange(0, min_open=True),
    metavar="NUMBER",
    default=1e-5,
    show_default=True,
    help="Largest difference attributed to rounding.",
)
@plugin_files
@json_output
def replay(
    file: Path,
    settings: tuple[str, ...],
    algorithm: str | None,
    framework: str | None,
    rewards: tuple[str, ...],
    group_size: int | None,
    checkpoint: str | None,
    tolerance: float,
    files: tuple[str, ...],
    as_json: bool,
) -> None:
    """Recompute the batch that veRL, TRL, slime or OpenRLHF dumped to FILE, and show where rlsdk's numbers differ.

    FILE is JSON lines, parquet, .npz, .safetensors or .pt. Rewards, advantages, ratios, losses and the gradient are
    compared if they were recorded. Each stage starts from the recorded inputs, so the first stage that differs is
    computed differently. Nothing in FILE is executed.
    """
    import yaml

    from rlsdk.replay.computed import replay_plan
    from rlsdk.replay.dump import dump_of
    from rlsdk.replay.files import read_columns, recognise
    from rlsdk.replay.stages import Replay
    from rlsdk.yaml_values import load_value

    if checkpoint is not None and checkpoint.isdigit():
        raise ArgumentError([f"--checkpoint: {checkpoint!r} given; expected a model's folder"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # plugins may print
        try:
            chosen = load_value(algorithm) if algorithm else None
        except yaml.YAMLError as error:
            raise ArgumentError([f"--algorithm: {algorithm!r} is not YAML: {' '.join(str(error).split())}"]) from error
        dump = dump_of(recognise(read_columns(file), framework), rewards=rewards, group_size=group_size)
        if checkpoint is not None and not dump.has_ids:
            raise ArgumentError([f"--checkpoint: {file} holds no token ids, whose logprobs a model could compute"])
        plan = replay_plan(chosen, settings, files, width=dump.width)
        gradients = None
        if checkpoint is not None:
            from rlsdk.whatif.gradients import Gradients, checkpoint_model
            from rlsdk.whatif.question import WhatIfQuestion

            model = stack.enter_context(checkpoint_model(Path(), checkpoint))
            gradients = Gradients(WhatIfQuestion(plan, plan, False, {}), model)
        found = Replay(dump, plan, tolerance=tolerance, gradients=gradients).result()
    if as_json:
        from rlsdk.viewer.runs import finite

        click.echo(json.dumps(finite({"file": str(file), **found}), indent=2, default=str))
    else:
        _show(found)


def _show(found: Mapping[str, Any]) -> None:
    from rich.text import Text

    from rlsdk.cli.output import borderless, console
    from rlsdk.errors import visible

    out = console()
    out.print(
        f"{found['framework']}: {counted(found['rollouts'], 'rollout')} in {counted(found['groups'], 'group')}, "
        f"{counted(found['tokens'], 'token')}",
        markup=False,
    )
    table = borderless("stage", "rlsdk", "theirs", "greatest difference", "")
    for each in found["stages"]:
        verdict = {True: "equal", False: "differs", None: "not recorded"}[each["equal"]]
        cells = (each["stage"], _brief(each["ours"]), _brief(each["theirs"]), _number(each["max_difference"]), verdict)
        table.add_row(*map(Text, cells))
    out.print(table)
    _show_loss(out, found)
    parted = found["first_difference"]
    if parted is None:
        compared = any(each["equal"] for each in found["stages"])
        out.print(
            "no difference" if compared else "nothing to compare with: only rlsdk's numbers are shown", markup=False
        )
    else:
        place = ""
        if first := parted["first"]:
            token = "" if first["token"] is None else f", response token {first['token']}"
            place = f" at rollout {first['rollout']}{token}: rlsdk {first['ours']:.6g}, theirs {first['theirs']:.6g}"
        out.print(f"first difference: {parted['stage']}{place}", markup=False, soft_wrap=True)
    for each in found["stages"]:
        if each["equal"] is False:
            reason = each["reason"] or "the reason is not recognised"
            out.print(f"{each['stage']}: {visible(reason)}", markup=False, soft_wrap=True)
    for note in found["notes"]:
        out.print(f"note: {visible(note)}", markup=False, soft_wrap=True)


def _show_loss(out: Any, found: Mapping[str, Any]) -> None:
    loss, gradient = found["loss"], found["gradient"]
    if loss["ours"] is None:
        return
    out.print(
        f"loss: rlsdk {loss['ours']:.6g}, from their advantages {loss['from_their_advantages']:.6g} "
        f"({loss['aggregate']}), theirs {_number(loss['theirs'])}",
        markup=False,
    )
    parts = [f"norm {gradient['norm']:.6g}"]
    if "cosine" in gradient:
        parts.append(
            f"theirs {gradient['their_norm']:.6g} ({gradient['theirs']}), cosine {_number(gradient['cosine'])}"
        )
    out.print(f"gradient of the logprobs: {', '.join(parts)}", markup=False)
    if "weights" in gradient:
        each = gradient["weights"]
        norms = f"norm {each['ours']:.6g}, from their advantages {each['from_their_advantages']:.6g}"
        recorded = _number(gradient.get("recorded_norm_of_weights"))
        out.print(
            f"gradient of the weights: {norms}, recorded {recorded}, cosine {_number(each['cosine'])}", markup=False
        )


def _brief(value: Any) -> str:
    if value is None or isinstance(value, float):
        return _number(value)
    return f"{value['mean']:z.4g} ({value['least']:z.4g} to {value['greatest']:z.4g})"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:z.6g}"
