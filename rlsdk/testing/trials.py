"""Start an engine or a learner with a small model in a child process, and check there what it does.

The child runs this module as a program: it could crash, hang, or change the settings of its process, and it needs the
environment variables that the component asks for before anything is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsdk import preflight
from rlsdk.contracts import ActorSpec, Requires
from rlsdk.errors import described
from rlsdk.isolation.process import end_with_parent
from rlsdk.plugins import Plugins
from rlsdk.testing.findings import NotApplicable, Violated
from rlsdk.testing.subject import Property, Subject

SECONDS = 300
"""Time limit of a child process."""
_RESULTS, _LOG, _ORDER = "results.jsonl", "log.txt", "order.json"
_LINES = 8
"""Number of lines at the end of a child's log that are shown if it ended early."""
Outcome = Violated | NotApplicable | None


def try_out(subject: Subject, properties: Sequence[Property]) -> Mapping[str, Outcome]:
    """Check properties of an engine or a learner in a child process; None is the outcome of one that holds."""
    if not subject.plugin:
        why = NotApplicable("a child process cannot import it by name; check its plugin or file instead")
        return dict.fromkeys((p.name for p in properties), why)
    made: Any = subject.make()
    needed = made.requires if isinstance(made, Requires) else ()
    if missing := preflight.packages(needed, f"{subject.component.kind} {subject.name}"):
        return dict.fromkeys((p.name for p in properties), NotApplicable(missing[0]))
    role: Any = subject.component.kind
    with tempfile.TemporaryDirectory(prefix="rlsdk-check-") as name:
        folder = Path(name)
        place = ActorSpec(role=role, cache=str(folder / "cache"))
        order = {
            "plugin": subject.plugin,
            "files": subject.plugins.files,
            "kind": role,
            "component": subject.component.name,
            "options": dict(subject.given),
            "properties": [p.name for p in properties],
            "parent": os.getpid(),
            "path": sys.path,
        }
        (folder / _ORDER).write_text(json.dumps(order), encoding="utf-8")
        ended = _run(folder, {**os.environ, **made.environment(place)})
        return _outcomes(folder, properties, ended)


def _run(folder: Path, environment: Mapping[str, str]) -> str:
    """Run the child process to its end, and return how it ended; empty if it completed."""
    with (folder / _LOG).open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = child.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return f"no answer within {SECONDS} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # with the processes that it started
            child.wait()
    return f"the process ended with status {status}" if status else ""


def _outcomes(folder: Path, properties: Sequence[Property], ended: str) -> dict[str, Outcome]:
    file = folder / _RESULTS
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found: dict[str, Outcome] = {}
    for prop, line in zip(properties, lines, strict=False):
        held = json.loads(line)
        violated = "sort" in held and Violated(held["sort"], held["expected"], held["got"])
        found[prop.name] = violated or ("skipped" in held and NotApplicable(held["skipped"])) or None
    log = (folder / _LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    for i, prop in enumerate(properties[len(lines) :]):
        tail = "".join(f"\n    {line}" for line in log[-_LINES:])
        first = Violated("raised", "a result", f"{ended}{tail}")
        found[prop.name] = NotApplicable(f"{properties[len(lines)].name}: {ended}") if i else first
    return found


def try_rules(subject: Subject, properties: Sequence[Property], folder: Path) -> list[dict[str, str]]:
    """Start a component and check its properties, appending each result to a file of the folder as it comes."""
    from rlsdk.testing.properties import engines, learners

    trial: Any = {"engine": engines.EngineTrial, "learner": learners.LearnerTrial}[subject.component.kind](
        subject.make(), folder / "model"
    )
    results: dict[str, dict[str, str]] = {}
    with (folder / _RESULTS).open("a", encoding="utf-8") as file:
        failed = ""
        for prop in properties:
            before = next((name for name in prop.after if results.get(name)), "")
            held = _tried(prop, subject, trial, failed, before)
            failed = prop.name if "sort" in held else ""
            results[prop.name] = held
            file.write(json.dumps(held) + "\n")
            file.flush()
    return list(results.values())


def _tried(prop: Property, subject: Subject, trial: Any, failed: str, before: str) -> dict[str, str]:
    if before:
        return {"skipped": f"{before} does not hold"}
    try:
        if failed:
            subject.call(trial.settle)
    except Violated as error:
        return {"skipped": f"{failed} does not hold, and then it could not be reset: {error.got}"}
    try:
        prop.rule(subject, trial)
    except Violated as error:
        return {"sort": error.sort, "expected": error.expected, "got": error.got}
    except NotApplicable as error:
        return {"skipped": str(error)}
    except Exception as error:  # noqa: BLE001 - what the component returned is not what the rule can read
        return {"sort": "raised", "expected": "a result of the form that its contract states", "got": described(error)}
    return {}


def main(folder: Path) -> None:
    """Check what the file in the folder orders."""
    from rlsdk.testing.conformance import properties

    order = json.loads((folder / _ORDER).read_text(encoding="utf-8"))
    end_with_parent(order["parent"])
    sys.path[:] = order["path"]
    plugins = Plugins(order["files"])
    plugins.activate(order["plugin"])
    component = plugins.components(order["plugin"], order["kind"])[order["kind"], order["component"]]
    chosen = {p.name: p for p in properties(component, start=True)}
    subject = Subject(component, order["options"], order["plugin"], plugins=plugins)
    try_rules(subject, [chosen[name] for name in order["properties"]], folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # threads of the component must not keep the process
