"""Classes as tools: each rollout has its own object, whose public methods the policy may call."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import types
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import attrs

from rlsdk.contracts import Chat
from rlsdk.errors import DataError, ValueFault, described
from rlsdk.isolation.threads import Threads
from rlsdk.types import Task
from rlsdk.workflows.environment import seed_of
from rlsdk.workflows.functions import Tool
from rlsdk.workflows.limits import LateError, call_within

log = logging.getLogger(__name__)

LIFECYCLE = ("reset", "get_reward", "close")
"""Public methods that the workflow calls; the policy cannot."""
_UNREADABLE = object()


class ToolObjectError(RuntimeError):
    """The object of a tool class cannot be used any more; its rollout fails."""


@attrs.frozen
class ToolClass:
    """A class that is instantiated for each rollout; its `tools` are methods that lack an object."""

    cls: type
    tools: tuple[Tool, ...]
    lifecycle: Mapping[str, Callable[..., Any]]

    @classmethod
    def of(cls, found: type) -> ToolClass:
        """Inspect a class without instantiating it.

        Raises:
            ValueFault: It cannot be instantiated without arguments, has no public method, or one that is unusable.
        """
        name = found.__name__
        if inspect.isabstract(found):
            raise ValueFault(f"{name} is an abstract class, which cannot be instantiated")
        methods = {
            key: getattr(found, key) if isinstance(member, classmethod) else types.MethodType(member, found)
            for key, member in inspect.getmembers_static(found)
            if not key.startswith("_") and (isinstance(member, classmethod) or inspect.isfunction(member))
        }
        lifecycle = {key: methods.pop(key) for key in LIFECYCLE if key in methods}
        if not methods:
            raise ValueFault(f"{name} has no public method for the policy to call ({', '.join(LIFECYCLE)} are not)")
        without = {
            name: found,
            **{f"{name}.{key}": lifecycle[key] for key in ("get_reward", "close") if key in lifecycle},
        }
        for label, function in without.items():
            if needed := _required(function, label):
                raise ValueFault(f"{label} is called without arguments, but requires {', '.join(needed)}")
        if "reset" in lifecycle:
            _required(lifecycle["reset"], f"{name}.reset", by_name=True)
        try:
            tools = tuple(Tool.of(method) for method in methods.values())
        except ValueFault as error:
            raise ValueFault(f"{name}: {error}") from error
        return cls(found, tools, lifecycle)

    @property
    def name(self) -> str:
        """Name of the class."""
        return self.cls.__name__

    @property
    def is_async(self) -> bool:
        """True if any of its methods is a coroutine function."""
        functions = [*self.lifecycle.values(), *(tool.function for tool in self.tools)]
        return any(inspect.iscoroutinefunction(function) for function in functions)

    def reset_arguments(self, task: Task) -> dict[str, Any]:
        """Return copies of those fields of a task that `reset` takes.

        Raises:
            DataError: The task lacks a field that it requires.
        """
        if "reset" not in self.lifecycle:
            return {}
        parameters = inspect.signature(self.lifecycle["reset"]).parameters
        columns = task.metadata if task.answer is None else {**dict.fromkeys(_ANSWER, task.answer), **task.metadata}
        offered = {**columns, "prompt": _prompt(task), "seed": seed_of(task)}
        required = _required(self.lifecycle["reset"], f"{self.name}.reset")
        if missing := [name for name in required if name not in offered]:
            raise DataError(
                f"task {task.id!r}: {self.name}.reset requires {', '.join(missing)}, which the task does not have; it "
                f"has {', '.join(map(str, offered))}"
            )
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        return deepcopy({name: value for name, value in offered.items() if takes_all or name in parameters})


@attrs.frozen
class ObjectMethod(Tool):
    """A tool that is a method of a rollout's object."""

    owner: ToolObject


class ToolObject:
    """The object of a tool class in one rollout.

    Its methods are called one at a time, sync ones in threads. One that takes too long may have left the object in any
    state, so the object is not used again.
    """

    def __init__(self, tool_class: ToolClass, threads: Threads, seconds: float) -> None:
        """Create nothing yet, see `start`; each call gets `seconds`, and sync methods run in threads."""
        self._class, self._threads, self._seconds = tool_class, threads, seconds
        self._instance: Any = None
        self._last_call: asyncio.Future[Any] | None = None

    @property
    def tools(self) -> list[ObjectMethod]:
        """Its methods for the policy."""
        return [ObjectMethod(**attrs.asdict(tool, recurse=False), owner=self) for tool in self._class.tools]

    async def start(self, task: Task) -> Any:
        """Create and reset the object, and return what `reset` adds to the prompt.

        Raises:
            DataError: The task lacks a field that `reset` requires.
            ToolObjectError: Constructor or `reset` raised, took too long or returned something else.
        """
        arguments = self._class.reset_arguments(task)
        self._instance = await self._managed("__init__", self._class.cls)
        if "reset" not in self._class.lifecycle:
            return None
        shown = await self._managed("reset", self._instance.reset, arguments)
        if not isinstance(shown, str | list | None):
            raise ToolObjectError(
                f"{self._class.name}.reset returned {shown!r:.200}; expected text for the prompt, a list of its parts, "
                "or None"
            )
        return shown

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a method that the policy chose, and return its result; raises what the method raises.

        If the caller stops waiting, as at the time limit of the rollout, `finish` waits for the call.

        Raises:
            ToolObjectError: It took too long.
        """
        self._last_call = asyncio.ensure_future(self._timed(name, getattr(self._instance, name), arguments))
        return await asyncio.shield(self._last_call)

    async def finish(self, chat: Chat) -> dict[str, Any]:
        """Give the rollout the reward that `get_reward` returns, if there is one; return the public attributes.

        Raises:
            ToolObjectError: `get_reward` raised or took too long, or the last call did.
        """
        if self._last_call is not None:
            await asyncio.wait([self._last_call])
            if isinstance(error := self._last_call.exception(), ToolObjectError):
                raise error
        if "get_reward" in self._class.lifecycle and chat.turns and chat.status != "aborted":
            value = await self._managed("get_reward", self._instance.get_reward)
            if value is not None:
                chat.reward(value)
        return await self.state()

    async def state(self) -> dict[str, Any]:
        """Return its public attributes, by the name of its class."""
        return {self._class.name: await self._managed("attributes", lambda: public_state(self._instance))}

    async def close(self) -> None:
        """Close the object if it was created and has `close`."""
        instance, self._instance = self._instance, None
        if self._last_call is not None:
            self._last_call.cancel()
        if instance is None or "close" not in self._class.lifecycle:
            return
        try:
            await self._managed("close", instance.close)
        except ToolObjectError as error:  # the rollout is over; how its object closes does not matter
            log.warning("%s", error)

    async def _managed(
        self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            return await self._timed(name, function, arguments or {})
        except ToolObjectError:
            raise
        except Exception as error:
            raise ToolObjectError(f"{self._class.name}.{name}: {described(error)}") from error

    async def _timed(self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        try:
            return await call_within(self._seconds, self._threads, function, **arguments)
        except LateError as error:
            raise ToolObjectError(f"{self._class.name}.{name} took longer than {self._seconds:g} s") from error


def public_state(instance: Any) -> dict[str, Any]:
    """Return the public attributes and properties of an object whose values JSON can express, as JSON has them."""
    names = dict.fromkeys(getattr(instance, "__dict__", {}))
    for name, member in inspect.getmembers_static(type(instance)):
        if isinstance(member, property | types.MemberDescriptorType):
            names[name] = None
    found = {name: _as_json(instance, name) for name in names if not name.startswith("_")}
    return {name: value for name, value in found.items() if value is not _UNREADABLE}


def _as_json(instance: Any, name: str) -> Any:
    try:
        return json.loads(json.dumps(getattr(instance, name), default=_number))
    except Exception:  # noqa: BLE001 - a client, a picture, a cycle, or a property that raises: nothing that a reward could read
        return _UNREADABLE


def _number(value: Any) -> Any:
    """Return the Python number of a scalar of numpy or torch."""
    if getattr(value, "shape", None) != ():
        raise TypeError
    return value.item()


def _required(function: Callable[..., Any], label: str, *, by_name: bool = False) -> list[str]:
    """Return the names of the required parameters.

    Raises:
        ValueFault: They cannot be read, or one that is needed `by_name` is positional-only.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueFault(f"the parameters of {label} cannot be read: {error}") from error
    needed = [each for each in parameters if each.default is each.empty]
    if by_name and (nameless := [each.name for each in needed if each.kind is each.POSITIONAL_ONLY]):
        raise ValueFault(f"{label} gets a task's fields by name, but {', '.join(nameless)} is positional-only")
    return [each.name for each in needed if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


_ANSWER = ("answer", "ground_truth", "solution")
"""Names under which `reset` gets the reference answer, as rewards of other trainers do."""


def _prompt(task: Task) -> str | list[dict[str, Any]]:
    if isinstance(task.prompt, str):
        return task.prompt
    return [{"role": message.role, "content": message.text} for message in task.prompt]
