"""A program whose first raylet is stopped; `test_placement.py` runs it separately from other tests' Ray."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil

from rlsdk.cluster.placement import ray_cluster
from rlsdk.config.schema import PlacementSection


def stop_the_first_raylet(stopped: list[psutil.Process], *, kill_gcs: bool) -> None:
    """As on a machine so busy that the raylet is not scheduled; or whose memory is short, so that the GCS is killed."""
    until = time.monotonic() + 60
    while not stopped and time.monotonic() < until:
        children = {process.name(): process for process in psutil.Process().children(recursive=True)}
        if "raylet" in children:
            children["raylet"].suspend()
            stopped.append(children["raylet"])
            if kill_gcs:
                time.sleep(1)  # by then, Ray asks it for the raylet
                children["gcs_server"].kill()
            return
        time.sleep(0.002)


def main() -> None:
    """Start Ray and report the state of the stopped raylet; with the argument `kill-gcs`, the GCS is killed, too."""
    logging.basicConfig(level=logging.WARNING)
    plan: Any = SimpleNamespace(config=SimpleNamespace(placement=PlacementSection()), apart={})
    stopped: list[psutil.Process] = []
    thread = threading.Thread(
        target=stop_the_first_raylet, args=(stopped,), kwargs={"kill_gcs": sys.argv[1] == "kill-gcs"}
    )
    thread.start()
    with ray_cluster(plan):
        thread.join()
        left = stopped[0].is_running() and stopped[0].status() != psutil.STATUS_ZOMBIE
        print(json.dumps("left" if left else "ended"))


if __name__ == "__main__":
    main()
