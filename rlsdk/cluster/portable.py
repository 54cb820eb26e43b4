"""Values between an actor and the program that starts it: a plan, its surroundings, and errors on the way back."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import attrs

from rlsdk.config import Plan
from rlsdk.errors import FingerprintError, RunError
from rlsdk.plugins import Plugins

log = logging.getLogger(__name__)
OF_THE_PROCESS = ("RAY_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""Beginnings of environment variables that Ray gave to a process: its devices, its threads, its own settings."""


@attrs.frozen
class Surroundings:
    """Working folder and environment variables of a program, by default of this one.

    Attributes:
        folder: Folder to which relative paths refer.
        environment: Environment variables.
    """

    folder: str = attrs.field(factory=os.getcwd)
    environment: Mapping[str, str] = attrs.field(factory=lambda: dict(os.environ), repr=False)

    def take_over(self) -> None:
        """Make them those of this process; on a machine without the folder, relative paths lead elsewhere."""
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        else:
            log.warning(
                "%s is not on this machine (%s): relative paths are not found", self.folder, os.uname().nodename
            )
        given = {name: text for name, text in self.environment.items() if not name.startswith(OF_THE_PROCESS)}
        os.environ.update(given)


@attrs.frozen
class PortablePlan:
    """A plan that can be sent to an actor, which finds the plugins itself and compares their fingerprints.

    Attributes:
        files: Path and text of each plugin that is a single file.
        active: Names of the plugins that the run uses.
        code: Fingerprints of the plugins and objects that the run uses, by name.
        pickled: The rest of the plan, pickled; it may refer to the modules of the plugins.
    """

    files: tuple[tuple[str, str], ...]
    active: tuple[str, ...]
    code: Mapping[str, Any]
    pickled: bytes = attrs.field(repr=False)

    @classmethod
    def of(cls, plan: Plan) -> PortablePlan:
        """Pack a plan."""
        from ray import cloudpickle

        plugins = plan.plugins
        nothing: Any = None
        rest = cloudpickle.dumps(attrs.evolve(plan, plugins=nothing))
        return cls(plugins.sources, plugins.active, plugins.used(), rest)

    def plan(self) -> Plan:
        """Unpack the plan.

        Raises:
            FingerprintError: This process has other code of a plugin than the program that packed the plan.
            PluginError: A plugin is missing or broken here.
        """
        from ray import cloudpickle

        plugins = Plugins()
        for path, text in self.files:
            plugins.add_file(path, text)
        for name in self.active:  # before the rest is unpickled, which may refer to what they define
            plugins.activate(name)
            if (here := plugins.fingerprint(name)) != self.code[name]:
                raise FingerprintError(
                    f"plugin {name!r} differs between driver and worker: driver {self.code[name]}, worker {here}; "
                    "install the same version on every node"
                )
        plan: Plan = attrs.evolve(cloudpickle.loads(self.pickled), plugins=plugins)
        return plan


def portable(error: BaseException) -> BaseException:
    """Return an error that other processes can read: itself or, if it cannot be pickled, its text."""
    from ray import cloudpickle

    try:
        found: BaseException = cloudpickle.loads(cloudpickle.dumps(error))
    except Exception as failed:  # noqa: BLE001 - whatever an exception's constructor wants
        log.debug("an error travels as text: %s", failed)
        return RunError(f"{type(error).__name__}: {error}")
    return found
