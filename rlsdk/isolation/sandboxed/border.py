"""Boundary between tests and the answer under test: two processes, one of which runs the model's code.

The tests' process calls functions of the answer. Arguments go there as pickles, since the tests are trusted; results
come back as JSON and become values of Python's own types. Any other object stays in the process that
created it: the tests get a `Far`, which can be called and iterated, has attributes, and equals nothing but itself.
"""

from __future__ import annotations

import builtins
import io
import json
import operator
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, BinaryIO, NoReturn

MAX_DIGITS = 4_000
"""Integers with more digits are written in hexadecimal, because Python refuses to convert them to or from decimal."""

_WRITTEN = {
    "decimal.Decimal": "",
    "fractions.Fraction": "",
    "datetime.date": "fromisoformat",
    "datetime.datetime": "fromisoformat",
    "datetime.time": "fromisoformat",
}
"""Types of the standard library that are sent as text -> name of the parser; empty for the type itself."""


def encode(value: Any, other: Callable[[Any], Any] = lambda value: {"other": type(value).__name__}) -> Any:
    """Return a value as JSON that distinguishes the types of Python's literals.

    Numbers, text, booleans and None stay as they are; lists, tuples, sets, mappings, bytes, very large numbers,
    decimals, fractions, dates and times become objects with one key.

    Args:
        value: Any value; an instance of a subclass of these types is encoded like the type.
        other: Encodes anything else; by default as the name of its type, which equals nothing.
    """
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() < 3 * MAX_DIGITS else {"hex": hex(value)}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [encode(each, other) for each in value]}
    if isinstance(value, set | frozenset):
        return {"set": [encode(each, other) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, other), encode(each, other)] for key, each in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    name = f"{type(value).__module__}.{type(value).__name__}"
    return {"written": [name, str(value)]} if name in _WRITTEN else other(value)


def decode(encoded: Any, other: Callable[[str, Any], Any]) -> Any:
    """Return the encoded value, built only from Python's own types.

    Args:
        encoded: Result of `encode`, parsed from JSON; hostile code may have written anything instead.
        other: Decodes values that the `other` of `encode` encoded, from their key and content.

    Raises:
        Exception: `encode` did not produce this.
    """
    if encoded is None or isinstance(encoded, bool | str | float | int):
        return encoded
    ((kind, content),) = encoded.items()
    if kind in ("list", "tuple", "set"):
        items = [decode(each, other) for each in content]
        return items if kind == "list" else tuple(items) if kind == "tuple" else set(items)
    if kind == "dict":
        return {decode(key, other): decode(each, other) for key, each in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "hex":
        return int(content, 16)
    if kind == "written":
        name, text = content
        reader = _WRITTEN[name]  # looked up before any import, since hostile code may name any module
        module, _, made_by = name.partition(".")
        maker = getattr(import_module(module), made_by)
        return getattr(maker, reader)(text) if reader else maker(text)
    return complex(*content) if kind == "complex" else other(kind, content)


LOST = 3
"""Exit status of the tests' process when the answer's process is gone."""

_MUTABLE = (list, dict, set)
"""Types of arguments that the answer may change in place."""

_DO: dict[str, Callable[..., Any]] = {
    "call": lambda function, /, *given, **named: function(*given, **named),
    "attribute": getattr,
    "set": setattr,
    "item": operator.getitem,
    "iterator": iter,
    "next": lambda iterator: list(islice(iterator, 1)),
    "length": len,
    "truth": bool,
    "text": str,
}
"""Operations that tests may apply to an object of the answer."""

# StopIteration would end the tests' loops early, and an exception such as SystemExit would end the tests.
_RAISED = {
    name: each
    for name, each in vars(builtins).items()
    if isinstance(each, type)
    and issubclass(each, Exception)
    and not issubclass(each, StopIteration | StopAsyncIteration | ExceptionGroup)
}


# From Python 3.13 on, the two methods can only be given by a subclass.
class _Pickler(pickle.Pickler):
    def __init__(self, file: BinaryIO, reference: Callable[[Any], Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._reference = reference

    def persistent_id(self, obj: Any) -> Any:
        return self._reference(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, resolve: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._resolve = resolve

    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(pid)


class Far:
    """Proxy in the tests' process for an object of the answer that is not plain data."""

    def __init__(self, ask: Callable[..., Any], number: int, kind: str) -> None:
        self.__dict__.update(_ask=ask, _number=number, _kind=kind)

    def __call__(self, /, *given: Any, **named: Any) -> Any:
        """Call the object in the answer's process."""
        return self._ask("call", self, *given, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{self._kind!r} object has no public attribute {name!r}")
        return self._ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", self, key)

    def __iter__(self) -> Iterator[Any]:
        return self._ask("iterator", self)  # type: ignore[no-any-return]  # Python checks it

    def __next__(self) -> Any:
        for each in self._ask("next", self):
            return each
        raise StopIteration

    def __len__(self) -> int:
        return self._ask("length", self)  # type: ignore[no-any-return]  # Python checks it

    def __bool__(self) -> bool:
        return self._ask("truth", self)  # type: ignore[no-any-return]  # Python checks it

    def __str__(self) -> str:
        return self._ask("text", self)  # type: ignore[no-any-return]  # Python checks it


class Tested:
    """Proxy in the tests' process for the answer."""

    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests, self._replies = requests, replies
        self._far: dict[int, Far] = {}
        self._near: list[Callable[..., Any]] = []

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """Return name -> value for the wanted names that the answer's module defines."""
        defined: dict[str, Any] = self._ask("names", *wanted)
        # No other names, which hostile code may add.
        values = {name: defined[name] for name in wanted if name in defined}
        # For modules of the standard library, use the tests' own, which the answer cannot have patched.
        modules = [name for name, value in values.items() if isinstance(value, Far) and value._kind == "module"]
        return values | {name: import_module(name) for name in modules if name in sys.stdlib_module_names}

    def function(self, name: str) -> Any:
        """Return a function of the answer, or a method of a new `Solution`."""
        return self._ask("function", name)

    def _ask(self, do: str, /, *operands: Any, **named: Any) -> Any:
        self._write(self._pickled((do, operands, named)))
        while "called" in (reply := self._received()):
            self._write(self._called(*reply["called"]))
        for index, after in reply.get("changed", ()):
            target, value = operands[index], self._decoded(after)
            if type(target) is not type(value) or type(target) not in _MUTABLE:
                raise TypeError("the answer changed an immutable argument")
            target.clear()
            target.extend(value) if isinstance(target, list) else target.update(value)
        if "raised" in reply:
            kind, arguments, text = reply["raised"]
            raise _RAISED[kind](*self._decoded(arguments)) if kind in _RAISED else RuntimeError(text)
        return self._decoded(reply["value"])

    def _called(self, number: int, given: Any) -> bytes:
        """Call a function of the tests for the answer; return its pickled result or exception."""
        try:
            return self._pickled((self._near[number](*self._decoded(given)), None))
        except Exception as error:  # noqa: BLE001 - the answer may handle it, as it would in a single process
            return self._pickled((None, error if type(error) in _RAISED.values() else RuntimeError(str(error))))

    def _pickled(self, message: Any) -> bytes:
        written = io.BytesIO()
        _Pickler(written, self._reference).dump(message)
        return written.getvalue()

    def _write(self, message: bytes) -> None:
        try:
            self._requests.write(message)
            self._requests.flush()
        except BrokenPipeError:
            os._exit(LOST)  # so that no `except` of a test catches it

    def _received(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line.endswith(b"\n"):
            os._exit(LOST)
        return json.loads(line)  # type: ignore[no-any-return]  # anything else fails the test

    def _reference(self, value: Any) -> tuple[str, int] | None:
        """Return a reference to an unpickled object: one of the answer, or a function or class of the tests."""
        if isinstance(value, Far):
            return ("yours", value._number)
        if isinstance(value, FunctionType | MethodType | type) and value.__module__ == "tests":
            self._near.append(value)
            return ("mine", len(self._near) - 1)
        return None

    def _decoded(self, found: Any) -> Any:
        return decode(found, self._other)

    def _other(self, kind: str, held: Any) -> Far:
        number, name = held
        if kind != "far" or type(number) is not int or type(name) is not str:
            raise TypeError(f"the answer returned {kind!r}, which is not plain data")
        return self._far.setdefault(number, Far(self._ask, number, name))


class AnswerServer:
    """Serves requests of the tests' process with the answer's module."""

    def __init__(self, module: ModuleType, requests: BinaryIO, replies: int) -> None:
        self._module, self._requests, self._replies = module, requests, replies
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def serve(self) -> NoReturn:
        """Serve the tests' requests until this process is killed."""
        while True:
            self._send(self._reply(*self._received()))

    def _reply(self, do: str, operands: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = {}
        try:
            mutable = [i for i, each in enumerate(operands) if do == "call" and type(each) in _MUTABLE]
            before = [self._encoded(operands[i]) for i in mutable]
            try:
                reply["value"] = self._encoded(self._do(do, operands, named))
            finally:
                after = [self._encoded(operands[i]) for i in mutable]
                reply["changed"] = [(i, b) for i, a, b in zip(mutable, before, after, strict=True) if a != b]
        except BaseException as error:  # noqa: BLE001 - whatever the answer's code raises, SystemExit too, is its result
            reply["raised"] = self._raised(error)
        return reply

    def _do(self, do: str, operands: tuple[Any, ...], named: dict[str, Any]) -> Any:
        space = vars(self._module)
        if do == "names":
            return {name: space[name] for name in operands if name in space}
        if do != "function":
            return _DO[do](*operands, **named)
        (name,) = operands
        if callable(function := getattr(self._module, name, None)):
            return function
        if isinstance(solution := getattr(self._module, "Solution", None), type):  # as on LeetCode
            return getattr(solution(), name)
        raise NameError(f"there is no function {name!r}, and no class Solution with this method")

    def _raised(self, error: BaseException) -> tuple[str, Any, str]:
        """Return an exception's class name, the arguments to create it again, and its text.

        Tests know only Python's own exceptions; any other is replaced by the built-in class that it derives from.
        """
        kind = type(error)
        try:
            text = f"{kind.__name__}: {error}"[:200]
            name = next((each.__name__ for each in kind.__mro__ if _RAISED.get(each.__name__) is each), "")
            arguments = error.args if kind.__name__ == name else (text,)
            return name, self._encoded(arguments), text
        except BaseException:  # noqa: BLE001 - the answer's exception may have a __str__ that raises
            return "", {"tuple": []}, kind.__name__

    def _encoded(self, value: Any) -> Any:
        return encode(value, self._numbered)

    def _numbered(self, value: Any) -> Any:
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a NumPy scalar
            return self._encoded(value.item())
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return {"far": [number, type(value).__name__]}

    def _received(self) -> Any:
        try:
            return _Unpickler(self._requests, self._resolved).load()  # from the tests, into a confined process
        except EOFError:  # the tests are done
            os._exit(0)

    def _resolved(self, reference: tuple[str, int]) -> Any:
        where, number = reference
        if where == "yours":
            return self._objects[number]

        def far(*given: Any) -> Any:
            self._send({"called": [number, self._encoded(given)]})
            while len(message := self._received()) == 3:  # the tests' function may call the answer itself
                self._send(self._reply(*message))
            value, error = message
            if error is not None:
                raise error
            return value

        return far

    def _send(self, reply: dict[str, Any]) -> None:
        line = json.dumps(reply).encode() + b"\n"
        while line:
            line = line[os.write(self._replies, line) :]
