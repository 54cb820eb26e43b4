"""Fingerprints of plugins' code, and references by which a worker finds the component that the driver chose."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from rlsdk.components import Use, component_of
from rlsdk.kinds import Kind


@attrs.frozen
class Fingerprint:
    """Identity of a plugin's code: distribution, version and a hash of its sources."""

    distribution: str
    version: str
    source: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} (source {self.source[:12]})".strip()


@attrs.frozen
class ComponentRef:
    """Reference by which a worker finds the component that the driver chose: name and fingerprint.

    Attributes:
        kind: Kind of the component.
        name: `plugin/name`.
        options: Options as given, without defaults.
        fingerprint: Fingerprint of the plugin on the driver.
        file: (path, source) of a single-file plugin.
        obj: The marked object itself, if one was given instead of a name.
    """

    kind: Kind
    name: str
    options: Mapping[str, Any]
    fingerprint: Fingerprint
    file: tuple[str, str] | None = None
    obj: Any = None


def of_text(text: str) -> Fingerprint:
    """Fingerprint a single-file plugin."""
    return Fingerprint("", "", _hash([text]))


def of_object(obj: Any) -> Fingerprint:
    """Fingerprint a marked object by its source, or by its bytecode if it has none (typed into an interpreter)."""
    try:
        text = inspect.getsource(obj)
    except (OSError, TypeError):
        text = _compiled(obj)
    return Fingerprint("", "", _hash([text]))


def of_package(distribution: str, version: str, package: str) -> Fingerprint:
    """Fingerprint an installed package by all its Python sources, as they were when this process first asked."""
    return Fingerprint(distribution, version, _package_hash(package))


def _compiled(obj: Any) -> str:
    """A function or class as text that is the same in every process."""
    if inspect.isclass(obj):
        functions = [(name, value) for name, value in sorted(vars(obj).items()) if inspect.isfunction(value)]
        # Methods that attrs generated hold numbers of their process.
        by_hand = [each for each in functions if not each[1].__code__.co_filename.startswith("<attrs generated")]
        methods = [(name, _compiled(value)) for name, value in by_hand]
        if not attrs.has(obj):
            return repr(methods)
        return repr((methods, [(field.name, _default(field.default)) for field in attrs.fields(obj)]))
    code = obj if isinstance(obj, types.CodeType) else obj.__code__
    return repr((code.co_code, code.co_names, [_constant(value) for value in code.co_consts]))


def _default(value: Any) -> str:
    if isinstance(value, Use):
        options = [(name, _default(option)) for name, option in sorted(value.options.items())]
        return repr((_default(value.name), options))
    if isinstance(value, list | tuple):
        return repr([_default(item) for item in value])
    component = component_of(value)
    if component is not None:
        return of_object(component.obj).source
    if isinstance(value, attrs.Factory):  # type: ignore[arg-type]
        return _compiled(value.factory) if inspect.isfunction(value.factory) else repr(value.factory)
    return repr(value)


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):  # its own repr holds an address
        return _compiled(value)
    if isinstance(value, frozenset):  # its order depends on the process
        return repr(sorted(map(repr, value)))
    return repr(value)


def _hash(texts: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() if isinstance(text, str) else text)
        digest.update(b"\0")
    return digest.hexdigest()


@functools.cache
def _package_hash(package: str) -> str:
    spec = importlib.util.find_spec(package)
    roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    named = [(f.relative_to(root).as_posix(), f) for root in roots for f in root.rglob("*.py")]
    if not named and spec and spec.origin:  # a package of a single module
        named = [(Path(spec.origin).name, Path(spec.origin))]
    return _hash(part for name, file in sorted(named) for part in (name, file.read_bytes()))
