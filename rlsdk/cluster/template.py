"""A process that imports the libraries of engines and learner while the checks run; Ray's workers are forked from it.

On a CPU, the imports of torch, transformers, vLLM and DeepSpeed dominate the start of a run. A *template* makes them
once, concurrently with the driver. The command starts it before the plan is known: it first imports what all roles
need. Once it gets the roles, it forks into one process per role, which imports what only that role needs. Ray starts
`join.py` instead of Python, which asks the process of its role to fork the worker. If that fails, the worker starts
like any other.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import attrs

from rlsdk.cluster.address import RayAddress
from rlsdk.cluster.gpus import RoleName
from rlsdk.cluster.placement import layout, placed_everywhere
from rlsdk.config import Plan
from rlsdk.contracts import ActorSpec, Preloads
from rlsdk.contracts.generation import NO_PROGRESS_BARS
from rlsdk.errors import RlsdkError
from rlsdk.isolation.framing import exactly
from rlsdk.isolation.process import end_with_parent, fork_alone, hidden, importing
from rlsdk.isolation.scratch import scratch_folder
from rlsdk.plugins import ComponentRef, Plugins
from rlsdk.preflight import read_cache_only

ROLES: tuple[RoleName, ...] = ("engine", "learner")
"""Roles whose processes may be forks."""
COMMON = (
    *("torch", "transformers.modeling_utils", "transformers.models.auto.tokenization_auto"),
    "transformers.modeling_layers",  # imported by every model file
    # Modules that Ray imports in each worker, except pyarrow, which starts a thread.
    *("google.protobuf.json_format", "google.protobuf.timestamp_pb2", "jsonschema", "pydantic.v1", "requests"),
)
"""Modules that the processes of all roles need."""
COMPILER = ("TORCHDYNAMO_", "TORCHINDUCTOR_")
"""Prefixes of environment variables that torch reads when it is imported."""
EXPECTED = {"TORCHDYNAMO_DISABLE": "1"}
"""Values of these variables in a run that compiles nothing, as most runs on a CPU."""
_GPU = Path("/dev/nvidiactl")
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rlsdk.cluster.template import main
main()
"""


@attrs.frozen
class TemplateRole:
    """Actors whose processes are forked from one template."""

    name: RoleName
    component: ComponentRef
    environment: Mapping[str, str]


@attrs.frozen(eq=False)
class Template:
    """A template that imports what all roles need, and waits for the roles."""

    process: subprocess.Popen[bytes]
    folder: Path
    listeners: Mapping[RoleName, socket.socket]
    compiler: Mapping[str, str]

    @classmethod
    @contextmanager
    def begun(cls, compiler: Mapping[str, str]) -> Iterator[Self]:
        """Start a template, which ends with the block."""
        with scratch_folder("rlsdk-start-") as folder, ExitStack() as stack:
            listeners: dict[RoleName, socket.socket] = {}
            for name in ROLES:
                listeners[name] = stack.enter_context(socket.socket(socket.AF_UNIX))
                listeners[name].bind(f"{folder}/{name}")
                listeners[name].listen()
            # A thread pool would not survive a fork. Each worker sets its own number of threads.
            single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(_path()), str(os.getpid())],
                pass_fds=[listener.fileno() for listener in listeners.values()],
                env={**os.environ, **compiler, **single, **NO_PROGRESS_BARS},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
            try:
                yield cls(process, folder, listeners, compiler)
            finally:
                process.kill()  # together with its forks
                process.wait()
                assert process.stdin is not None
                with suppress(BrokenPipeError):
                    process.stdin.close()

    def serve(self, roles: Sequence[TemplateRole]) -> dict[str, str]:
        """Make the template serve these roles; return the command that replaces Python for each, by role."""
        import cloudpickle

        served = [(self.listeners[role.name].fileno(), role.component, dict(role.environment)) for role in roles]
        others = [listener.fileno() for name, listener in self.listeners.items() if name not in {r.name for r in roles}]
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as given:
            given.write(cloudpickle.dumps((_path(), served, others)))
        for listener in self.listeners.values():
            listener.close()
        python = [sys.executable, "-I", "-S", str(Path(__file__).with_name("join.py"))]
        return {role.name: shlex.join([*python, f"{self.folder}/{role.name}"]) for role in roles}


@contextmanager
def warmed() -> Iterator[Template | None]:
    """Start a template before the plan is known, for `template`; None if no run could use one."""
    if _can_fork() and not os.environ.get("RAY_ADDRESS"):
        with Template.begun(EXPECTED) as begun:
            yield begun
    else:
        yield None


@contextmanager
def template(plan: Plan, begun: Template | None = None) -> Iterator[Mapping[str, str]]:
    """Make a template serve a run; yield the command that replaces Python for each role, by role.

    Yields nothing if workers cannot be forked: on an existing cluster, in a Ray runtime environment, on a machine with
    GPUs (CUDA does not survive a fork), or if roles differ in variables that torch reads when it is imported.

    Args:
        plan: Plan of the run.
        begun: Template that was started earlier; it can serve only one run.
    """
    place = plan.config.placement
    elsewhere = RayAddress.find(place) is not None or place.runtime_env
    roles = _roles(plan) if _can_fork() and not elsewhere and place.device != "cuda" else []
    compilers = {tuple((k, v) for k, v in sorted(r.environment.items()) if k.startswith(COMPILER)) for r in roles}
    if begun is not None and [dict(compiler) for compiler in compilers] != [begun.compiler]:
        begun.process.kill()
        begun = None
    with ExitStack() as stack:
        if len(compilers) == 1:
            begun = begun or stack.enter_context(Template.begun(dict(compilers.pop())))
        yield begun.serve(roles) if begun is not None else {}


def import_common() -> None:
    """Import what all roles and the driver's checks need; failed imports are reported where they are used."""
    for name in COMMON:
        with suppress(Exception):  # a broken installation may raise anything
            importlib.import_module(name)


def _path() -> list[str]:
    return [path or os.getcwd() for path in sys.path]


def _can_fork() -> bool:
    return sys.platform == "linux" and not _GPU.exists()


def _roles(plan: Plan) -> list[TemplateRole]:
    found = layout(plan, os.cpu_count() or 1, gpus=0)
    place, roles = plan.config.placement, []
    kinds: list[tuple[RoleName, ComponentRef, int, int]] = [
        ("learner", plan.learner, place.learners, found.learner_threads)
    ]
    if plan.needs_engine:
        kinds.append(("engine", plan.engine, place.engines, found.engine_threads))
    for name, reference, count, threads in kinds:
        spec = ActorSpec(role=name, world_size=count, threads=threads, **placed_everywhere(plan, found))
        with suppress(RlsdkError):  # the checks report it
            roles.append(TemplateRole(name, reference, plan.plugins.resolve(reference).environment(spec)))
    return roles


def main() -> None:
    """Run the template: import what all roles need, fork one process per role, and wait to be ended."""
    end_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles interrupts
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the forks are not waited for
    with importing(), hidden("ray"):
        import_common()
        with suppress(Exception):  # otherwise each process compiles hundreds of patterns when it loads a model
            importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")
    sys.path[:], roles, others = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
    for descriptor in others:
        os.close(descriptor)
    listeners = [socket.socket(fileno=descriptor) for descriptor, *_ in roles]
    base = os.getpid()
    for listener, (_, component, environment) in zip(listeners, roles, strict=True):
        if os.fork() == 0:
            for other in listeners:
                if other is not listener:
                    other.close()
            end_with_parent(base)
            _serve(listener, component, environment)
            return
    for listener in listeners:  # otherwise a caller of a dead role process would wait for this one
        listener.close()
    while True:
        signal.pause()


def _serve(listener: socket.socket, reference: ComponentRef, environment: Mapping[str, str]) -> None:
    """Import what a role needs, then fork a worker per caller; returns only in a worker, at its end."""
    os.environ.update(environment)
    with importing(), hidden("ray"):  # Ray reads its variables when it is imported, and sets them for each worker
        component = Plugins().resolve(reference)
        if isinstance(component, Preloads):
            component.preload()
    if len(os.listdir("/proc/self/task")) > 1:  # threads started by a plugin would be missing in the forks
        return
    while True:
        caller, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            fork_alone()
            _work(caller)
            return
        caller.close()


def _work(caller: socket.socket) -> None:
    """Become the worker in place of the caller, which ends when the connection is closed at the end."""
    size, streams, _, _ = socket.recv_fds(caller, 8, 3)
    request = json.loads(exactly(caller, int.from_bytes(size, "big")))
    caller.sendall(b"f")
    if caller.recv(1) != b"g":  # it timed out and has become the worker itself
        return
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    environment = request["environment"]
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    # Ray locates the process title next to the first variable, which must not move.
    os.environ.update({k: v for k, v in environment.items() if os.environ.get(k) != v})
    if "torch" in sys.modules and (threads := environment.get("OMP_NUM_THREADS")):
        sys.modules["torch"].set_num_threads(int(threads))
    if environment.get("HF_HUB_OFFLINE") == "1":  # the driver may have set it since the template was started
        read_cache_only()
    arguments = request["arguments"]
    script = next(i for i, argument in enumerate(arguments) if not argument.startswith("-"))
    sys.argv = arguments[script:]
    runpy.run_path(sys.argv[0], run_name="__main__")
