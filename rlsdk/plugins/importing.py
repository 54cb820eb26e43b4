"""Find functions that a configuration names by file or module."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rlsdk.errors import ValueFault, described
from rlsdk.options import nearest


def find(path: str) -> Any:
    """Import the object at a path such as `my_file.py:fn`, `package.module:fn` or `my_file.py:object.method`.

    Args:
        path: File relative to the working folder, or importable module; after the colon, a name in it.

    Raises:
        ValueFault: The object cannot be found or imported; the message has the cause.
    """
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise ValueFault(f"expected FILE.py:FUNCTION or package.module:FUNCTION, got {path!r}")
    found: Any = _from_file(place) if place.endswith(".py") else _from_package(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueFault(f"{place} has no {name!r}{_offered(found, part)}")
        found = getattr(found, part)
    return found


def unreadable(path: str | Path, error: OSError | UnicodeDecodeError) -> str:
    """Return a sentence about an unreadable Python file, with the nearest file name in its folder."""
    path = Path(path)
    cause = error.strerror if isinstance(error, OSError) else error
    where = "" if path.is_absolute() else f" (working folder: {Path.cwd().name}/)"
    folder = path.expanduser().parent
    near = nearest(path.name, [file.name for file in folder.glob("*.py")]) if not path.exists() else None
    return f"{path} cannot be read: {cause}{where}" + (f"; did you mean {path.with_name(near)}?" if near else "")


def _offered(holder: Any, name: str) -> str:
    public = sorted(key for key, value in vars(holder).items() if callable(value) and not key.startswith("_"))
    near = nearest(name, public)
    guess = f", did you mean {near!r}?" if near else ""
    return f"{guess}; it has: {', '.join(public[:12]) or 'nothing that can be called'}"


def _from_package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, or the panic of a library in Rust
        file = f"{name.replace('.', '/')}.py"
        hint = f"; for the file in the working folder, write {file}" if Path(file).is_file() else ""
        raise ValueFault(f"module {name} cannot be imported: {described(error)}{hint}") from error


def _from_file(place: str) -> ModuleType:
    file = Path(place).expanduser().absolute()
    try:
        source = file.read_bytes()
    except OSError as error:
        raise ValueFault(unreadable(place, error)) from error
    try:
        return _module(file, hashlib.sha256(source).hexdigest())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, or the panic of a library in Rust
        raise ValueFault(f"{place} cannot be imported: {described(error)}") from error


@lru_cache(maxsize=64)
def _module(file: Path, digest: str) -> ModuleType:
    """Load a file as a separate module, executed once per content; modules in the same folder can be imported."""
    name = f"_rlsdk_foreign_{file.stem}_{hashlib.sha256(f'{file}{digest}'.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(file.parent))
    return module
