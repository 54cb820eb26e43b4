"""The command `rlsdk-tinker`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import yaml

import rlsdk
from rlsdk_tinker.server import check_key, serve
from rlsdk_tinker.service import TinkerService

PLACEHOLDERS = Path(__file__).with_name("placeholders.py")
CLIENTS = ("tasks", "reward", "workflow", "algorithm", "sampling", "steps", "epochs", "batch_size", "group_size")
"""Sections of a configuration that the client decides on."""
SETTINGS = (
    "tasks.train={use: placeholders/tasks}",
    "reward=placeholders/reward",
    # The server gives the learner every loss as -weight · logprob, and divides by nothing.
    "algorithm={use: grpo, policy_loss: reinforce, aggregate: token-mean, kl_coef: 0.0}",
    "sampling={temperature: 1.0, max_tokens: 1}",
    "steps=1",  # which is never taken
    "batch_size=1",
    "old_logprobs=rollout",
    "learner.schedule=constant",
    "learner.warmup_steps=0",
    "checkpoint.every=0",
    "save_rollouts=0",
)
DEFAULTS = {
    "name": "tinker",
    # Those of the client.
    "learner.betas": "[0.9, 0.95]",
    "learner.eps": "1.0e-12",
    "learner.weight_decay": "0.0",
    "learner.grad_clip": "0.0",
}


def settings(config: Path, overrides: Sequence[str]) -> list[str]:
    """Return the settings that complete a configuration of model, engine, learner and placement.

    Args:
        config: The YAML file.
        overrides: Settings of the command line.

    Raises:
        click.UsageError: It has a section that the client decides on.
    """
    try:
        given = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError:
        given = {}  # reported by the check of the configuration
    keys = [*given, *(each.partition("=")[0].partition(".")[0] for each in overrides)]
    if wrong := [key for key in keys if key in CLIENTS]:
        raise click.UsageError(
            f"{config}: {', '.join(sorted(set(wrong)))}: the client decides on this; leave it out. A server has "
            "name, seed, model, engine, learner and placement"
        )
    learner = given.get("learner") or {}
    said = {*given, *(f"learner.{key}" for key in (learner if isinstance(learner, dict) else ()))}
    said |= {each.partition("=")[0] for each in overrides}
    return [*(f"{key}={value}" for key, value in DEFAULTS.items() if key not in said), *overrides, *SETTINGS]


@click.command(context_settings={"help_option_names": ["--help"]})
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8010, show_default=True, help="Port to listen on.")
@click.option("--overwrite", is_flag=True, help="Delete what an earlier server left in the run's folder.")
def main(config: Path, overrides: Sequence[str], host: str, port: int, *, overwrite: bool) -> None:
    """Serve Tinker's API with the model, engine and learner of the YAML file CONFIG.

    A client finds the server by the environment variable TINKER_BASE_URL. Any key that begins with tml- is accepted,
    unless TINKER_API_KEY is set for the server: then only that one. An address that other machines reach needs it.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    key = os.environ.get("TINKER_API_KEY")
    check_key(host, key)
    try:
        completed = settings(config, overrides)
        with rlsdk.Trainer.from_config(config, *completed, plugins=[PLACEHOLDERS], overwrite=overwrite) as trainer:
            folder = Path(trainer.plan.folder).resolve() / "tinker"
            asyncio.run(serve(TinkerService(trainer, folder), host, port, key))
    except KeyboardInterrupt:
        click.echo("stopped", err=True)
    except rlsdk.RlsdkError as error:
        click.echo(f"rlsdk-tinker: {error}", err=True)
        sys.exit(2 if isinstance(error, rlsdk.ConfigError) else 1)
