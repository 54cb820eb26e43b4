"""Mailboxes by which the two programs of a run meet on a Ray cluster; each notices at once when the other's is gone.

A mailbox belongs to the program that made it and ends with it, also by SIGKILL. Values travel through Ray's object
store; a mailbox holds only references.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import socket
import uuid
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from rlsdk.cluster.actor_failures import died, reason
from rlsdk.cluster.actors import spawn
from rlsdk.config import Plan
from rlsdk.config.tree import leaves
from rlsdk.errors import ConfigError, RunError
from rlsdk.storage.location import is_url

log = logging.getLogger(__name__)
Program = Literal["explorer", "trainer"]
OWN = frozenset({"log_level", "placement.partner_timeout"})
"""Settings in which the two programs may differ."""


class Mailbox:
    """Messages to one program: calls, which wait for an answer, and notices, which do not."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[tuple[int | None, str, Any]] = asyncio.Queue()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    async def call(self, name: str, content: Any) -> Any:
        """Leave a message and return its answer."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._messages.put_nowait((number, name, content))
        try:
            return await answer
        finally:
            del self._asked[number]

    async def notify(self, name: str, content: Any) -> None:
        """Leave a message that needs no answer."""
        self._messages.put_nowait((None, name, content))

    async def next(self) -> tuple[int | None, str, Any]:
        """Wait for the next message, as the owner: its number (None for a notice), name and content."""
        return await self._messages.get()

    async def answer(self, number: int, content: Any) -> None:
        """Answer a message; the answer is dropped if the sender has gone."""
        asked = self._asked.get(number)
        if asked is not None and not asked.done():
            asked.set_result(content)

    async def stay(self) -> None:
        """Never return: a call of this fails when the owner ends."""
        await asyncio.Event().wait()


@attrs.frozen(kw_only=True)
class PeerInfo:
    """A program's description of itself.

    Attributes:
        name: Name of its mailbox.
        mailbox: Handle of the actor.
        where: Host and process, for messages.
        tree: Its configuration, as plain values.
        code: Fingerprint of the code of each plugin.
    """

    name: str
    mailbox: Any
    where: str
    tree: Mapping[str, Any]
    code: Mapping[str, Mapping[str, str]]


class GoneError(RunError):
    """Raised when the program that was asked has ended."""


@attrs.frozen
class Reply:
    """An answer: a value, or an error in its place; and `beside`, which the sender attaches to every answer."""

    value: Any
    error: BaseException | None = None
    beside: Any = None


def namespace(plan: Plan) -> str:
    """Return the Ray namespace of a run, derived from its folder."""
    folder = hashlib.sha256(
        os.fsencode(plan.location if is_url(plan.config.out) else plan.folder.resolve())
    ).hexdigest()[:16]
    return f"rlsdk-{plan.config.name}-{folder}"


def open_mailbox(plan: Plan, half: Program) -> PeerInfo:
    """Create this program's mailbox, on its own node, under a name that the other program finds."""
    import ray

    name = f"{half}-{uuid.uuid4().hex}"
    here = ray.get_runtime_context().get_node_id()
    mailbox = spawn(Mailbox, name=name, namespace=namespace(plan), node=here)
    where = f"process {os.getpid()} on {socket.gethostname()}"
    return PeerInfo(name=name, mailbox=mailbox, where=where, tree=plain(plan.tree), code=plan.code)


def mailboxes(plan: Plan, half: Program) -> dict[str, Any]:
    """Map name -> handle of all mailboxes of one kind of program, including those that died recently."""
    import ray

    space = namespace(plan)
    named = (each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == space)
    found = {}
    for name in sorted(named):
        if name.startswith(f"{half}-"):
            try:
                found[name] = ray.get_actor(name, namespace=space)
            except ValueError:  # it went meanwhile
                continue
    return found


async def ask(mailbox: Any, name: str, *content: Any) -> Reply:
    """Call the program that owns a mailbox.

    Args:
        mailbox: Handle of the mailbox.
        name: Name of the request.
        *content: Arguments, which travel through the object store.

    Raises:
        GoneError: The program has ended.
        BaseException: The error that it answered with.
    """
    import ray

    try:
        (answer,) = await mailbox.call.remote(name, [ray.put(content)])
        reply: Reply = await answer
    except Exception as error:
        if died(error):
            raise GoneError(reason(error)) from error
        raise
    if reply.error is not None:
        raise reply.error
    return reply


async def tell(mailbox: Any, name: str, *content: Any) -> None:
    """Leave a notice for the program that owns a mailbox, if it still exists."""
    import ray

    try:
        await mailbox.notify.remote(name, [ray.put(content)])
    except Exception as error:
        if not died(error):
            raise
        log.debug("nobody is told %s: %s", name, reason(error))


async def opened(content: Any) -> Any:
    """Fetch the content of a message."""
    return await content[0]


def reply(value: Any, error: BaseException | None = None, beside: Any = None) -> list[Any]:
    """Pack an answer for the object store; an error that cannot be pickled becomes its text."""
    import ray

    return [ray.put(Reply(value, error if error is None else _portable(error), beside))]


def _portable(error: BaseException) -> BaseException:
    from ray import cloudpickle

    try:
        found: BaseException = cloudpickle.loads(cloudpickle.dumps(error))
    except Exception as failed:  # noqa: BLE001 - whatever an exception's constructor wants
        log.debug("an error travels as text: %s", failed)
        return RunError(f"{type(error).__name__}: {error}")
    return found


async def until_gone(mailbox: Any) -> str:
    """Wait until a program has ended, and return why."""
    try:
        await mailbox.stay.remote()
    except Exception as error:
        if died(error):
            return reason(error)
        raise
    raise RunError("a mailbox has stopped waiting")


def plain(value: Any) -> Any:
    """Convert a configuration to plain values; a marked object becomes its text."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def differences(explorer: PeerInfo, trainer: PeerInfo) -> list[str]:
    """Describe the differences between two programs that must agree: a sentence per setting, and per plugin's code."""
    theirs, ours = dict(leaves(explorer.tree)), dict(leaves(trainer.tree))
    found = [
        f"{path}: the explorer has {_shown(theirs, path)}, the trainer {_shown(ours, path)}"
        for path in sorted({*theirs, *ours})
        if _shown(theirs, path) != _shown(ours, path) and path not in OWN
    ]
    names = sorted({*explorer.code, *trainer.code})
    other = [name for name in names if explorer.code.get(name) != trainer.code.get(name)]
    return [*found, *(f"plugin {name}: the explorer has other code of it than the trainer" for name in other)]


def disagreement(explorer: PeerInfo, trainer: PeerInfo) -> ConfigError | None:
    """Return the error of an explorer that cannot work for a trainer; None if it can."""
    found = differences(explorer, trainer)
    return ConfigError([f"{each}; both take the same" for each in found]) if found else None


def _shown(leaves: Mapping[str, Any], path: str) -> str:
    return repr(leaves[path]) if path in leaves else "nothing there"


def require_cluster(plan: Plan) -> None:
    """Require a Ray cluster that neither program starts.

    Raises:
        ConfigError: The plan and the environment name no cluster.
    """
    if not (plan.config.placement.ray or os.environ.get("RAY_ADDRESS")):
        raise ConfigError(
            [
                "placement.ray: explorer and trainer meet on a Ray cluster, and none is given. Start one by "
                "`ray start --head`, and name it by placement.ray=auto or RAY_ADDRESS"
            ]
        )
