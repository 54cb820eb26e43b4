"""Context managers that watch a run, or other work on engines such as an evaluation or a server."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rlsdk.cluster.watchdog import GRACE_SECONDS, Report, Watchdog
from rlsdk.config.schema import WatchdogSection
from rlsdk.errors import RunError
from rlsdk.isolation.watching import CURRENT, stage

log = logging.getLogger(__name__)


@contextmanager
def watching(
    section: WatchdogSection,
    abandon: Callable[[str], None],
    report: Report | None = None,
) -> Iterator[Watchdog]:
    """Watch a run during a block.

    Args:
        section: Limits.
        abandon: Called with the verdict if the run does not end when told to; records how it ended. The process then
            exits, unless the run is not in its main thread, as in a notebook.
        report: Called with the findings for the processes; see `Watchdog`.
    """
    is_main = threading.current_thread() is threading.main_thread()

    def give_up(verdict: str) -> None:
        writer = threading.Thread(target=abandon, args=(verdict,), daemon=True)
        writer.start()
        writer.join(GRACE_SECONDS)
        if is_main:
            os._exit(1)

    watchdog = Watchdog(section, abandon=give_up, report=report)
    token = CURRENT.set(watchdog)
    watchdog.start()
    try:
        yield watchdog
    finally:
        watchdog.close()
        with suppress(ValueError):  # a manually used trainer may be closed in another context
            CURRENT.reset(token)


@contextmanager
def watched(section: WatchdogSection, name: str) -> Iterator[None]:
    """Watch work on engines that is not a run, during a block; a process that is silent for too long ends it.

    Args:
        section: Limits.
        name: Name of the activity in messages, such as `the evaluation`.

    Raises:
        RunError: A process was silent for too long, or Ray died; the message names the culprit.
    """

    def abandon(verdict: str) -> None:
        log.error("%s did not end when asked to; its process exits now: %s", name, verdict)

    with watching(section, abandon) as watchdog, stage(name):
        try:
            yield
        except BaseException as error:
            if watchdog.verdict:
                raise RunError(watchdog.verdict) from error
            raise
        watchdog.check()
