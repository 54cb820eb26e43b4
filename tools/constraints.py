"""Write `constraints-cpu.txt`, the package versions with which the tests of this commit passed.

    python tools/constraints.py

It lists all direct and indirect requirements of `rlsdk[cpu]`, as installed in this Python's environment. Install the
same versions with `pip install -c constraints-cpu.txt 'rlsdk[cpu]'`.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILE = Path(__file__).resolve().parent.parent / "constraints-cpu.txt"
HEAD = "# Versions with which rlsdk[cpu] was tested, on Linux with Python 3.11: python tools/constraints.py\n"


def installed(name: str, extras: frozenset[str], found: dict[str, str], seen: set[tuple[str, frozenset[str]]]) -> None:
    """Collect the versions of a distribution's installed direct and indirect requirements."""
    key = (canonicalize_name(name), extras)
    if key in seen:
        return
    seen.add(key)
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:  # not needed on this system
        return
    found[key[0]] = distribution.version.partition("+")[0]  # the index determines torch's build
    for requirement in map(Requirement, distribution.requires or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            installed(requirement.name, frozenset(requirement.extras), found, seen)


def main() -> None:
    """Write the file."""
    found: dict[str, str] = {}
    installed("rlsdk", frozenset({"cpu"}), found, set())
    found.pop("rlsdk")
    FILE.write_text(HEAD + "".join(f"{name}=={found[name]}\n" for name in sorted(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
