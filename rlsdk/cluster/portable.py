"""Values exchanged between an actor and the program that starts it: plans, objects, environments and errors."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import attrs

from rlsdk.config import Plan
from rlsdk.errors import FingerprintError, RunError
from rlsdk.plugins import ComponentRef, Plugins
from rlsdk.plugins.fingerprints import code_differs

log = logging.getLogger(__name__)
OF_THE_PROCESS = ("RAY_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""Prefixes of environment variables that Ray sets for a process: devices, threads, Ray's own settings."""


@attrs.frozen
class Surroundings:
    """Working folder and environment variables of a program; by default, this one's."""

    folder: str = attrs.field(factory=os.getcwd)
    environment: Mapping[str, str] = attrs.field(factory=lambda: dict(os.environ), repr=False)

    def take_over(self) -> None:
        """Apply them to this process; on a machine without the folder, relative paths lead elsewhere."""
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        else:
            log.warning(
                "%s is not on this machine (%s): relative paths will not be found", self.folder, os.uname().nodename
            )
        given = {name: text for name, text in self.environment.items() if not name.startswith(OF_THE_PROCESS)}
        os.environ.update(given)


@attrs.frozen
class PortablePlan:
    """A plan to send to an actor, which loads the plugins itself and compares their fingerprints.

    Attributes:
        files: Path and text of each single-file plugin.
        active: Names of the plugins that the run uses.
        code: Fingerprints of the plugins and objects that the run uses, by name.
        pickled: The rest of the plan, pickled; it may refer to modules of the plugins.
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
            FingerprintError: The code of a plugin differs from that of the program that packed the plan.
            PluginError: A plugin is missing or broken here.
        """
        from ray import cloudpickle

        plugins = Plugins()
        for path, text in self.files:
            plugins.add_file(path, text)
        for name in self.active:  # before the rest is unpickled, which may refer to their definitions
            plugins.activate(name)
            if (here := plugins.fingerprint(name)) != self.code[name]:
                raise FingerprintError(code_differs(name, self.code[name], here))
        plan: Plan = attrs.evolve(cloudpickle.loads(self.pickled), plugins=plugins)
        return plan


def portable(error: BaseException) -> BaseException:
    """Return an error that other processes can read: the error itself or, if it cannot be pickled, its text."""
    from ray import cloudpickle

    try:
        found: BaseException = cloudpickle.loads(cloudpickle.dumps(error))
    except Exception as failed:  # noqa: BLE001 - an exception's constructor may raise anything
        log.debug("an error cannot be pickled and is sent as text: %s", failed)
        return RunError(f"{type(error).__name__}: {error}")
    return found


def pickle_by_value(reference: ComponentRef | None) -> None:
    """Pickle a decorated object by value, since actors may be unable to import its module."""
    if reference is None or reference.obj is None:
        return
    from ray import cloudpickle

    module = sys.modules.get(getattr(reference.obj, "__module__", ""))
    if module is not None and module.__name__ != "__main__" and not module.__name__.startswith("rlsdk."):
        cloudpickle.register_pickle_by_value(module)
