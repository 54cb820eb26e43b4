"""Start and kill Ray actors, stream the values that they yield, explain why a call failed, and count deaths."""

from __future__ import annotations

import logging
import pickle
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle

from rlsdk.cluster.gpus import GPUSeat
from rlsdk.isolation.process import redirect
from rlsdk.isolation.vitals import Identity, identity
from rlsdk.isolation.watching import forget_actor, watch_actor

log = logging.getLogger(__name__)
LONGEST = 240
"""Maximum length of a reason in characters, since Ray's texts fill a screen."""

_STACK = re.compile(r"frame #\d+: |<omitting python frames>|Exception raised from ")

IDENTIFY_SECONDS = 0.01
"""Seconds that an actor waits before a load that blocks its event loop, so that its answer to `identity` is sent."""


class RunActor:
    """Base class of actors that the watchdog watches: each has a log file, and identifies its process."""

    def __init__(self, log_path: str = "") -> None:
        """Redirect the output of this process to a file, if it can be opened.

        Args:
            log_path: Path of the file; empty leaves the output to Ray.
        """
        if log_path:
            try:
                redirect(log_path)
            except OSError as error:  # no reason to end a run whose other processes work
                log.warning("the log %s cannot be opened: %s; output goes to Ray's log", log_path, error.strerror)

    def identity(self) -> Identity:
        """Identify this process, which can write its stacks on request; any answer shows that it is not stuck."""
        import ray

        return identity(ray.get_runtime_context().get_node_id())


def spawn(
    cls: type,
    *arguments: Any,
    cpus: float = 0.0,
    gpus: float = 0.0,
    seat: GPUSeat | None = None,
    resources: Mapping[str, float] | None = None,
    environment: Mapping[str, str] | None = None,
    python: str = "",
    name: str = "",
    namespace: str = "",
    node: str = "",
    concurrency: int = 0,
    watched_as: str = "",
    log_path: object = "",
    replaced: bool = False,
    responsive: bool = False,
) -> Any:
    """Start an actor and return its handle; Ray does not restart it.

    Args:
        cls: Class of the actor.
        *arguments: Arguments of its constructor.
        cpus: Cores that Ray reserves.
        gpus: Number of GPUs that Ray reserves on any node; a fraction if they are shared.
        seat: GPUs already reserved for this actor; None if it has none or requests them with `gpus`.
        resources: Additional resources that Ray reserves, by name.
        environment: Environment variables of its process.
        python: Command that starts its process in place of Python; empty for Python.
        name: Name of the actor in Ray; empty for none.
        namespace: Ray namespace of that name; empty for the driver's.
        node: Id of the node to run on; empty lets Ray choose.
        concurrency: Maximum concurrent calls; 0 for Ray's default.
        watched_as: Name in the watchdog's messages, such as `learner rank 0`; empty for an actor that is not watched.
        log_path: File with the actor's output, named in those messages.
        replaced: True if a dead actor is replaced, so that the run continues.
        responsive: True if it answers within `watchdog.busy`, whatever it works on; otherwise, its calls may take
            `watchdog.learner_busy`.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

    strategy: Any = NodeAffinitySchedulingStrategy(node, soft=False) if node else None
    if seat is not None:
        strategy = PlacementGroupSchedulingStrategy(seat.group, seat.bundles[0])
        environment = {**(environment or {}), **seat.environment}
    options: dict[str, Any] = {
        "max_concurrency": concurrency,
        "name": name,
        "namespace": namespace,
        "resources": dict(resources or {}),
        "runtime_env": {
            **({"env_vars": dict(environment)} if environment else {}),
            **({"py_executable": python} if python else {}),
        },
        "scheduling_strategy": strategy,
    }
    given = {option: value for option, value in options.items() if value}
    actor = ray.remote(cls).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, **given).remote(*arguments)
    if watched_as:
        watch_actor(watched_as, actor, log_path or "Ray's", replaced=replaced, responsive=responsive)
    return actor


def kill(actor: Any) -> None:
    """Kill an actor, which may be unreachable or already dead; the watchdog does not report it."""
    import ray

    forget_actor(actor)
    if not ray.is_initialized():  # `ray.kill` would restart Ray
        return
    with suppress(ray.exceptions.ActorHandleNotFoundError):  # Ray has been restarted in the meantime
        ray.kill(actor)


def died(error: BaseException) -> bool:
    """Return True if the actor is dead, False if its code raised."""
    from ray import exceptions

    if isinstance(error, exceptions.RayTaskError):  # its code raised, perhaps because another actor died
        return False
    if isinstance(error, exceptions.RayActorError):
        return not error.actor_init_failed
    gone = (
        exceptions.NodeDiedError,
        exceptions.ObjectLostError,  # an answer was lost with its node
        exceptions.OutOfMemoryError,
        exceptions.WorkerCrashedError,
    )
    return isinstance(error, gone)


def never_ran(error: BaseException) -> bool:
    """Return True if the actor's node died before the actor's process existed.

    Until Ray notices that a node is gone, which takes it ten seconds or more, it still places actors there; once it has
    noticed, it refuses an actor for that node.
    """
    from ray import exceptions

    if isinstance(error, exceptions.ActorUnschedulableError):
        return True
    return died(error) and "its node has died" in str(error) and "The actor never ran" in str(error)


def not_created(error: BaseException) -> bool:
    """Return True if a call failed since the actor's constructor raised, or its arguments could not be read."""
    from ray import exceptions

    return isinstance(error, exceptions.RayActorError) and bool(error.actor_init_failed)


def cause_of(error: BaseException) -> BaseException:
    """Return the exception that the actor's code raised, or the error itself if it was not raised there."""
    return getattr(error, "cause", None) or error


def described(error: BaseException, log: Path | None = None) -> str:
    """Describe in one line why a call of an actor failed: it died (with the last words of its log), or it raised."""
    cause = cause_of(error)
    if not_created(cause):
        machine = re.search(r"\bip=([^,)]+)", str(cause))
        return f"it could not be created{f' on {machine[1]}' if machine else ''}: {reason(cause)}"
    return f"its process died: {death(cause, log)}" if died(cause) else f"{type(cause).__name__}: {cause}"


def death(error: BaseException, log: Path | None) -> str:
    """Return the cause of a death in one line, and the last words of the log, if the actor has one."""
    words = last_words(log) if log is not None else ""
    return f"{reason(error)}; its log ends with {words!r}" if words else reason(error)


def reason(error: BaseException) -> str:
    """Return the cause of a death in one line, as reported by Ray."""
    if short := out_of_memory(str(error)):
        return short
    if "unexpectedly exits with a connection error" in str(error):  # Ray only saw the connection end
        return "it crashed, or something killed it"
    if "The actor is temporarily unavailable" in str(error):  # so did its caller, before Ray knew of any death
        return "it crashed, something killed it, or its machine cannot be reached any more"
    if "Owner's worker process has crashed" in str(error):
        return "the program that started it crashed, or something killed it"
    text = re.sub(r"Worker exit type: \w+ Worker exit detail: ", "", str(error)).split(" Some common causes")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    vague = ("in its creation task", "This may be because")  # the exception follows
    causes = (line for line in reversed(lines) if "because" in line and not any(words in line for words in vague))
    telling = next(causes, lines[-1])
    return telling if len(telling) <= LONGEST else f"{telling[: LONGEST - 1]}…"


def last_words(log: Path) -> str:
    """Return the last line of an actor's log, shortened; empty if this machine does not have the log.

    The stack of C++ that torch writes after a warning of a lost connection says nothing.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16384))
            lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip() and not _STACK.match(line)), "")
    return last if len(last) <= LONGEST else f"{last[: LONGEST - 1]}…"


def out_of_memory(text: str) -> str:
    """Summarise Ray's out-of-memory report in a sentence; return "" for any other text."""
    if "due to the node running low on memory" not in text:
        return ""
    node = re.search(r"Memory on the node \(IP: ([^,)]+)[^)]*\) was ([\d.]+GB) used / ([\d.]+GB) limit", text)
    where = f" of node {node[1]} ran out ({node[2]} of {node[3]} were in use)" if node else " of its node ran out"
    used = re.search(r"actual memory used=([\d.]+GB)", text)
    return (
        f"Ray killed it, since the memory{where}{f'; it used {used[1]}' if used else ''}. Lower what `rlsdk explain` "
        "counts: placement.engines, engine.kv_cache_gib, learner.micro_batch_tokens"
    )


class ActorFailures:
    """Deaths of actors of one role."""

    def __init__(self, role: str, most: int, logs: Path | None = None) -> None:
        """Create a record without failures.

        Args:
            role: Role of the actors, such as `rollout worker`, whose logs are `rollout-worker-RANK.log`.
            most: Maximum number of deaths per rank (`placement.engine_restarts`).
            logs: Folder of their logs; None if they have none.
        """
        self._role, self._most, self._logs = role, most, logs
        self._of: defaultdict[int, list[str]] = defaultdict(list)
        self.sentences: list[str] = []

    def add(self, rank: int, step: int, error: BaseException) -> str:
        """Add a death, and return its sentence."""
        log = self._logs / self._log(rank) if self._logs is not None else None
        said = f"step {step}: {self._role} {rank}: {death(error, log)}"
        for failures in (self.sentences, self._of[rank]):
            failures.append(said)
        return said

    def too_many(self, rank: int) -> str:
        """Return the message for an actor that died too often; empty if it has not."""
        failures = self._of[rank]
        if len(failures) <= self._most:
            return ""
        every = "\n".join(f"  {said}" for said in failures)
        return (
            f"{self._role} {rank} died {len(failures)} times; a run survives "
            f"placement.engine_restarts={self._most}. Its log is logs/{self._log(rank)}:\n{every}"
        )

    def forget(self, rank: int) -> None:
        """Reset the deaths of a rank, since a new actor takes its place."""
        self._of[rank].clear()

    def _log(self, rank: int) -> str:
        return f"{self._role.replace(' ', '-')}-{rank}.log"


def pickled(value: Any) -> bytes:
    """Pickle a value that an actor yields; `streamed` unpickles it."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - an object of a class that only cloudpickle pickles, which takes half as long again
        data: bytes = cloudpickle.dumps(value)
        return data


async def streamed(method: Any, *arguments: Any) -> AsyncIterator[Any]:
    """Call a method of an actor that yields values made by `pickled`, and yield them as they arrive.

    While Ray waits for the next value of a stream it fetches, and so unpickles, the value, and once more when the value
    is awaited (ray 2.60, `ObjectRefGenerator._next_async`). Bytes are only copied, so actors yield bytes.

    Args:
        method: Bound method of an actor's handle. An actor in this process may yield its values as they are.
        *arguments: Arguments of the call.

    Raises:
        RayError: The actor has died.
        Exception: The method raised.
    """
    async for reference in method.options(num_returns="streaming").remote(*arguments):
        value = await reference
        yield pickle.loads(value) if isinstance(value, bytes) else value  # noqa: S301 - from an actor of the run
