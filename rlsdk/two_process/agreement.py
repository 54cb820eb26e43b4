"""Connect the two programs of a run on a Ray cluster: discovery, comparison of settings, detection of an end."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import uuid
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from rlsdk.cluster.actors import died, not_created, reason, spawn
from rlsdk.config import Plan
from rlsdk.config.tree import leaves, plain
from rlsdk.contracts import StreamsWeights
from rlsdk.errors import ConfigError, RunError
from rlsdk.storage.location import is_url

log = logging.getLogger(__name__)
Program = Literal["explorer", "trainer"]
OWN = frozenset({"log_level", "placement.partner_timeout"})
"""Settings in which the two programs may differ."""


@attrs.frozen
class PeerInfo:
    """A program's description of itself.

    Attributes:
        where: Host and process, for messages.
        tree: Its configuration, as plain values.
        code: Fingerprint of the code of each plugin.
    """

    where: str
    tree: Mapping[str, Any]
    code: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, plan: Plan) -> PeerInfo:
        """Describe this program."""
        return cls(f"process {os.getpid()} on {socket.gethostname()}", plain(plan.tree), plan.code)


def namespace(plan: Plan) -> str:
    """Return the Ray namespace of a run, derived from its folder."""
    folder = plan.location if is_url(plan.config.out) else plan.folder.resolve()
    return f"rlsdk-{plan.config.name}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}"


def spawn_named(plan: Plan, program: Program, cls: type, *arguments: Any, watched_as: str = "") -> Any:
    """Start an actor on this program's node under a name that the other program finds; it ends with this program."""
    import ray

    return spawn(
        cls,
        *arguments,
        name=f"{program}-{uuid.uuid4().hex}",
        namespace=namespace(plan),
        node=ray.get_runtime_context().get_node_id(),
        watched_as=watched_as,
    )


def named(plan: Plan, program: Program) -> dict[str, Any]:
    """Map name -> handle of the actors of one kind of program, including those that died recently."""
    import ray

    space = namespace(plan)
    names = (each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == space)
    found = {}
    for name in sorted(names):
        if name.startswith(f"{program}-"):
            try:
                found[name] = ray.get_actor(name, namespace=space)
            except ValueError:  # it has ended in the meantime
                continue
    return found


def differences(explorer: PeerInfo, trainer: PeerInfo) -> list[str]:
    """Describe the differences between two programs that must agree, one sentence per setting and plugin."""
    theirs, ours = dict(leaves(explorer.tree)), dict(leaves(trainer.tree))

    def shown(leaves: Mapping[str, Any], path: str) -> str:
        return repr(leaves[path]) if path in leaves else "no value"

    found = [
        f"{path}: the explorer has {shown(theirs, path)}, the trainer {shown(ours, path)}"
        for path in sorted({*theirs, *ours})
        if shown(theirs, path) != shown(ours, path) and path not in OWN
    ]
    names = sorted({*explorer.code, *trainer.code})
    other = [name for name in names if explorer.code.get(name) != trainer.code.get(name)]
    return [*found, *(f"plugin {name}: the explorer and the trainer have different code" for name in other)]


def disagreement(explorer: PeerInfo, trainer: PeerInfo) -> ConfigError | None:
    """Return the error of an explorer that cannot work for a trainer; None if it can."""
    found = differences(explorer, trainer)
    return ConfigError([f"{each}; both programs need the same" for each in found]) if found else None


class TrainerPresence:
    """Actor that ends with the trainer's program, and describes it."""

    def __init__(self, own: PeerInfo) -> None:
        """Create the actor."""
        self._own = own

    async def info(self) -> PeerInfo:
        """Return the trainer's description of itself."""
        return self._own

    async def stay(self) -> None:
        """Never return; a call fails when the program ends."""
        await asyncio.Event().wait()


async def living_trainers(plan: Plan) -> list[PeerInfo]:
    """Describe the trainers of a run, including one that works with another explorer."""
    found = []
    for presence in (await asyncio.to_thread(named, plan, "trainer")).values():
        try:
            found.append(await presence.info.remote())
        except Exception as error:
            if not (died(error) or not_created(error)):
                raise
    return found


async def until_gone(presence: Any) -> str:
    """Wait until a trainer's program has ended, and return why."""
    try:
        await presence.stay.remote()
    except Exception as error:
        if died(error):
            return reason(error)
        raise
    raise RunError("the trainer's presence has stopped waiting")


def require_cluster(plan: Plan) -> None:
    """Require a Ray cluster that neither program starts, and a weight transfer that does not call the learner.

    Raises:
        ConfigError: The plan and the environment name no cluster, or the engines would have to call the learner.
    """
    faults = []
    if not (plan.config.placement.ray or os.environ.get("RAY_ADDRESS")):
        faults.append(
            "placement.ray: explorer and trainer need a Ray cluster, but none is set. Start one with "
            "`ray start --head`, and set placement.ray=auto or RAY_ADDRESS"
        )
    if isinstance(plan.plugins.resolve(plan.weight_transfer), StreamsWeights):
        faults.append(
            f"rollout.weight_transfer: {plan.weight_transfer.name!r} sends weights while engines receive them, but the "
            "explorer, a separate program, cannot call the learner for that; use object_store"
        )
    if faults:
        raise ConfigError(faults)
