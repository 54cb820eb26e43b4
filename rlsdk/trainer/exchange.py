"""Where two programs of one run meet on a Ray cluster: each has a mailbox, and hears at once when the other's is gone.

A mailbox belongs to the program that made it and ends with it, also by SIGKILL. Values travel through Ray's object
store; a mailbox holds references alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs

from rlsdk.config import Plan
from rlsdk.errors import ConfigError, RunError
from rlsdk.rollout.deaths import died, reason

log = logging.getLogger(__name__)
Half = Literal["explorer", "trainer"]
OWN = frozenset({"log_level", "placement.partner_timeout"})
"""Settings in which halves may differ."""


class Mailbox:
    """Letters to one program: calls, which wait for an answer, and notices, which do not."""

    def __init__(self) -> None:
        self._letters: asyncio.Queue[tuple[int | None, str, Any]] = asyncio.Queue()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    async def call(self, name: str, content: Any) -> Any:
        """Leave a letter; returns its answer."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._letters.put_nowait((number, name, content))
        try:
            return await answer
        finally:
            del self._asked[number]

    async def notify(self, name: str, content: Any) -> None:
        """Leave a letter that wants no answer."""
        self._letters.put_nowait((None, name, content))

    async def next(self) -> tuple[int | None, str, Any]:
        """The next letter, as soon as there is one, for the owner: its number, None for a notice; name and content."""
        return await self._letters.get()

    async def answer(self, number: int, content: Any) -> None:
        """Answer a letter; one whose sender has gone is answered to nobody."""
        asked = self._asked.get(number)
        if asked is not None and not asked.done():
            asked.set_result(content)

    async def stay(self) -> None:
        """Never returns: a call that fails when the owner ends."""
        await asyncio.Event().wait()


@attrs.frozen(kw_only=True)
class Card:
    """What a program says of itself.

    Attributes:
        name: Of its mailbox.
        mailbox: Handle of the actor.
        where: Host and process, for messages.
        tree: Its configuration, as plain values.
        code: What identifies the code of each plugin.
    """

    name: str
    mailbox: Any
    where: str
    tree: Mapping[str, Any]
    code: Mapping[str, Mapping[str, str]]


class GoneError(RunError):
    """The program that was asked has ended."""


@attrs.frozen
class Reply:
    """An answer: a value, or the error that came in its place; and what the half tells with every answer."""

    value: Any
    error: BaseException | None = None
    beside: Any = None


def namespace(plan: Plan) -> str:
    """Of the actors by which the programs of a run find each other: that of its folder."""
    folder = hashlib.sha256(os.fsencode(plan.folder.resolve())).hexdigest()[:16]
    return f"rlsdk-{plan.config.name}-{folder}"


def open_mailbox(plan: Plan, half: Half) -> Card:
    """Make this program's mailbox, on its own node, under a name that the other half finds."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = f"{half}-{uuid.uuid4().hex}"
    options: dict[str, Any] = {"name": name, "namespace": namespace(plan), "num_cpus": 0, "scheduling_strategy": here}
    mailbox = ray.remote(Mailbox).options(**options).remote()
    where = f"process {os.getpid()} on {socket.gethostname()}"
    return Card(name=name, mailbox=mailbox, where=where, tree=plain(plan.tree), code=plan.code)


def mailboxes(plan: Plan, half: Half) -> dict[str, Any]:
    """Name -> handle of the mailboxes of all programs of a half that are there, the dead of late included."""
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
        mailbox: Its handle.
        name: Of what is asked for.
        *content: Goes through the object store.

    Raises:
        GoneError: The program has ended.
        BaseException: What it answered.
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
    """Leave a notice with the program that owns a mailbox, if there still is one."""
    import ray

    try:
        await mailbox.notify.remote(name, [ray.put(content)])
    except Exception as error:
        if not died(error):
            raise
        log.debug("nobody is told %s: %s", name, reason(error))


async def opened(content: Any) -> Any:
    """What a letter holds."""
    return await content[0]


def reply(value: Any, error: BaseException | None = None, beside: Any = None) -> list[Any]:
    """An answer on its way; of an error that cannot travel, its text."""
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
    """Why a program has ended, as soon as it has."""
    try:
        await mailbox.stay.remote()
    except Exception as error:
        if died(error):
            return reason(error)
        raise
    raise RunError("a mailbox has stopped waiting")


def plain(value: Any) -> Any:
    """A configuration as plain values; a marked object as its text."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def differences(explorer: Card, trainer: Card) -> list[str]:
    """In what two halves differ that must not: a sentence for each setting, and each plugin of other code."""
    theirs, ours = dict(_leaves(explorer.tree)), dict(_leaves(trainer.tree))
    found = [
        f"{path}: the explorer has {_shown(theirs, path)}, the trainer {_shown(ours, path)}"
        for path in sorted({*theirs, *ours})
        if _shown(theirs, path) != _shown(ours, path) and path not in OWN
    ]
    names = sorted({*explorer.code, *trainer.code})
    other = [name for name in names if explorer.code.get(name) != trainer.code.get(name)]
    return [*found, *(f"plugin {name}: the explorer has other code of it than the trainer" for name in other)]


def disagreement(explorer: Card, trainer: Card) -> ConfigError | None:
    """The error of an explorer that cannot work for a trainer; None if it can."""
    found = differences(explorer, trainer)
    return ConfigError([f"{each}; both take the same" for each in found]) if found else None


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves(below, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for i, below in enumerate(value):
            yield from _leaves(below, f"{path}[{i}]")
    else:
        yield path, value


def _shown(leaves: Mapping[str, Any], path: str) -> str:
    return repr(leaves[path]) if path in leaves else "nothing there"


def require_cluster(plan: Plan) -> None:
    """Two programs need a Ray that neither of them starts.

    Raises:
        ConfigError: There is none.
    """
    if not (plan.config.placement.ray or os.environ.get("RAY_ADDRESS")):
        raise ConfigError(
            [
                "placement.ray: explorer and trainer meet on a Ray cluster, and none is given. Start one by "
                "`ray start --head`, and name it by placement.ray=auto or RAY_ADDRESS"
            ]
        )
