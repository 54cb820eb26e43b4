"""Start a private Ray on this machine for a run, with little output and on loopback only.

Ray lacks options for much of this, so attributes of its private modules are patched while it starts, which is why its
version is pinned.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlsdk.errors import RunError

log = logging.getLogger(__name__)
START_ATTEMPTS = 3
"""Number of attempts to start Ray before the run fails."""


def silence_reports_of_actor_failures() -> None:
    """Stop Ray from printing a screenful for each process that ends; rlsdk logs one line with process and reason.

    Ray 2.60 has no setting for it; `log_to_driver` only affects the output of workers.
    """
    from ray._private import worker

    original = worker.print_to_stdstream
    if getattr(original, "silences_actor_failures", False):
        return

    def print_others(data: Mapping[str, Any], *rest: Any, **options: Any) -> None:
        if not str(data["lines"][0]).startswith("A worker died or was killed"):
            original(data, *rest, **options)

    print_others.silences_actor_failures = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = print_others


def start_ray(**options: Any) -> None:
    """Start Ray on this machine, with retries, since its 30 s startup timeout is too short on a busy machine.

    Args:
        **options: Options of `ray.init`.

    Raises:
        RunError: No attempt succeeded; the message has Ray's reason and the load of the machine.
    """
    import psutil
    import ray

    this = psutil.Process()
    before = set(this.children(recursive=True))
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            with _on_loopback(), _quickly():
                ray.init(address="local", include_dashboard=False, **options)
            return
        except ValueError:  # caused by arguments or machine, such as too little shared memory: a retry would not help
            raise
        except Exception as error:
            ray.shutdown()
            for process in set(this.children(recursive=True)) - before:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            said = " ".join(str(error).split()) or type(error).__name__
            load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
            if attempt == START_ATTEMPTS:
                raise RunError(
                    f"Ray did not start on this machine in {attempt} attempts ({load}); the last error was: "
                    f"{said} Wait until the machine is less busy, or start Ray by `ray start --head` and set "
                    "placement.ray=auto; its logs are in /tmp/ray"
                ) from error
            log.warning("Ray did not start (%s): %s Trying again, %d of %d", load, said, attempt + 1, START_ATTEMPTS)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make a single-machine cluster listen only on 127.0.0.1.

    Ray replaces `_node_ip_address="127.0.0.1"` by another address of the machine. On Windows and macOS it listens on
    loopback because of this constant, which can be set by an environment variable only before the first import.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _quickly() -> Iterator[None]:
    """Make Ray start only the processes that a run needs: GCS, raylet, workers, and the runtime-env agent.

    This saves about four CPU seconds per start: no dashboard head (which Ray starts for usage statistics even without a
    dashboard), no dashboard agent, no autoscaler and no log monitor. Ray's worker setup script imports half of Ray;
    `setup_worker` does not. Ray checks once a second whether its raylet has registered, although that takes less than
    half a second, so this polls faster.
    """
    from ray._private import node, parameter, ray_constants, services, utils
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # not in its stub

    folder, python = Path(__file__).parent, services._build_python_executable_command_memory_profileable
    registered = services.get_node

    def no_head(self: Any, **_: Any) -> None:
        self._webui_url = ""

    def no_agent(component: str, *rest: Any, **options: Any) -> list[str]:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [sys.executable, "-I", "-S", str(folder / "no_agent.py")]
        return list(python(component, *rest, **options))

    def soon_registered(gcs_address: str, node_id: str) -> Any:
        client = GcsClient(address=gcs_address)
        end = time.monotonic() + 10
        # Without a timeout, a call to a GCS that was killed would never return.
        while time.monotonic() < end and node_id not in {each.hex() for each in client.get_all_node_info(timeout=5)}:
            time.sleep(0.01)
        return registered(gcs_address, node_id)

    params = partial(
        parameter.RayParams,
        no_monitor=True,
        include_log_monitor=False,
        setup_worker_path=str(folder / "setup_worker.py"),
    )
    with ExitStack() as stack:
        for where, replacement in (
            ((parameter, "RayParams"), params),
            ((node.Node, "start_api_server"), no_head),
            ((services, "get_node"), soon_registered),
            ((services, "_build_python_executable_command_memory_profileable"), no_agent),
            ((utils, "get_dashboard_dependency_error"), partial(ImportError, "disabled")),  # its check imports them
        ):
            stack.callback(setattr, *where, getattr(*where))
            setattr(*where, replacement)
        yield
