"""The fault matrix: what fails, how, when, and how the run must end."""

from __future__ import annotations

from typing import Any, Literal

import attrs

End = Literal["continued", "resumed", "stopped"]
MOMENTS = ("start", "generation", "update", "sync", "checkpoint", "evaluation", "end")


@attrs.frozen(kw_only=True)
class Cell:
    """One fault.

    Attributes:
        who: Whose process, or component.
        what: The fault.
        when: The moment.
        end: `continued` to its last step; `resumed`: the process was gone and `--resume` did the rest; `stopped` at
            once with the culprit named, and `--resume` did the rest.
        says: Regular expression for what a person must read on the console; empty where nobody can say anything.
        how: Which variant of the fault.
        inside: The component fails by itself; else the fault comes from outside while the run waits at the moment.
        before: The fault is there before the run starts.
        prepared: A run of four steps has ended before; the fault is met by the run that resumes it.
        always: The fault comes at each such moment, not once.
        room: File systems of its own are needed.
        shm: Size of `/dev/shm` there.
        files: Open files that the process may have; beyond those that it has, where the fault comes in mid-run.
        settings: Of the runs of its lineage, as on the command line.
        fresh: The run in which it happens is to be a new one.
        said_at_end: What must be read comes with the end of the run.
    """

    who: str
    what: str
    when: str
    end: End
    says: str = ""
    how: str = ""
    inside: bool = False
    before: bool = False
    prepared: bool = False
    always: bool = False
    room: bool = False
    shm: str = ""
    files: int = 0
    settings: tuple[str, ...] = ()
    fresh: bool = False
    said_at_end: bool = False

    @property
    def lineage(self) -> tuple[bool, str, tuple[str, ...]]:
        """Common properties of the cells of one lineage."""
        return self.room, self.shm, self.settings

    @property
    def name(self) -> str:
        """How the cell is called on the command line."""
        return f"{self.who}/{self.what}/{self.when}" + (f"/{self.how}" if self.how else "")


INSIDE = {"inside": True}
PREPARED = {"prepared": True}
ROOM = {"room": True}
PURPOSE = "a fault on purpose"
RANK = "learner rank 0 failed in"
READ_ONLY = "rlsdk: .{0,900}file system is read-only"
DAMAGED = r"checkpoints/step-\d+.{0,100}damaged|step-\d+\.damaged"
_TABLE: tuple[tuple[str, str, str, End, str, dict[str, Any]], ...] = (
    # who, what, when, end, what the console says, further attributes
    ("driver", "SIGKILL", "start generation update sync checkpoint evaluation end", "resumed", "", {}),
    ("driver", "SIGSTOP and SIGCONT", "generation update checkpoint", "continued", "", {}),
    ("driver", "exception", "update", "stopped", "shaping 'shaping' failed", INSIDE),
    ("driver", "out of memory", "update", "stopped", "shaping 'shaping' failed: MemoryError", INSIDE),
    ("driver", "disk full", "generation checkpoint end", "stopped", "the disk is full", ROOM),
    (
        "driver",
        "read-only folder",
        "generation checkpoint end",
        "stopped",
        "rlsdk: .{0,900}file system is read-only",
        ROOM,
    ),
    ("driver", "corrupted checkpoint", "start", "resumed", DAMAGED, {**PREPARED, "how": "truncated shard"}),
    ("driver", "corrupted checkpoint", "start", "resumed", DAMAGED, {**PREPARED, "how": "flipped byte"}),
    ("driver", "corrupted checkpoint", "start", "resumed", DAMAGED, {**PREPARED, "how": "missing shard"}),
    ("driver", "corrupted checkpoint", "start", "resumed", DAMAGED, {**PREPARED, "how": "empty state"}),
    ("driver", "corrupted checkpoint", "start", "resumed", DAMAGED, {**PREPARED, "how": "state without keys"}),
    ("driver", "damaged rollouts.db", "start", "resumed", r"rollouts\.db\.damaged", PREPARED),
    ("driver", "damaged rollouts.db", "generation", "stopped", r"rollouts\.db", {}),
    ("driver", "garbled metrics.jsonl", "start", "resumed", r"metrics\.jsonl", PREPARED),
    ("driver", "locked rollouts.db", "generation checkpoint", "continued", "", {}),
    ("driver", "few open files", "start", "stopped", "128 open files", {"before": True, "files": 128}),
    ("driver", "few open files", "generation", "stopped", "open files", {}),
    ("engine", "few open files", "generation", "continued", "", {}),
    ("driver", "full shared memory", "start", "continued", "", {**ROOM, "before": True, "shm": "1m"}),
    ("driver", "full shared memory", "update", "continued", "", {**ROOM, "shm": "256m"}),
    ("engine", "SIGKILL", "start", "stopped", "engine 0 did not start", {}),
    ("engine", "SIGKILL", "generation update sync checkpoint evaluation", "continued", "engine 0", {}),
    ("engine", "SIGKILL", "end", "continued", "", {}),
    ("engine", "SIGSTOP and SIGCONT", "generation sync evaluation", "continued", "", {}),
    ("engine", "exception", "start", "stopped", f"engine 0 did not start.*{PURPOSE}", INSIDE),
    ("engine", "exception", "generation sync", "stopped", f"engine.{{0,200}}{PURPOSE}", INSIDE),
    ("engine", "out of memory", "generation sync", "stopped", "engine.{0,200}MemoryError", INSIDE),
    ("learner rank", "SIGKILL", "start generation update sync checkpoint evaluation end", "stopped", RANK, {}),
    ("learner rank", "SIGSTOP and SIGCONT", "update sync checkpoint", "continued", "", {}),
    ("learner rank", "exception", "start update sync checkpoint end", "stopped", f"{RANK}.{{0,200}}{PURPOSE}", INSIDE),
    ("learner rank", "out of memory", "update", "stopped", f"{RANK}.{{0,200}}MemoryError", INSIDE),
    ("learner rank", "NaN gradients", "update", "continued", "gradient not finite", INSIDE),
    (
        "learner rank",
        "NaN gradients",
        "update",
        "stopped",
        "not finite",
        {**INSIDE, "always": True, "how": "each time"},
    ),
    ("environment worker", "SIGKILL", "generation update evaluation", "continued", "environment worker lost", {}),
    ("environment worker", "SIGSTOP and SIGCONT", "generation", "continued", "", {}),
    ("environment worker", "exception", "generation evaluation", "continued", "", INSIDE),
    ("environment worker", "out of memory", "generation", "continued", "", INSIDE),
    ("scorer", "SIGKILL", "generation", "continued", "", {}),
    ("scorer", "SIGSTOP and SIGCONT", "generation", "continued", "", {}),
    ("scorer", "exception", "generation", "continued", "", INSIDE),
    ("scorer", "out of memory", "generation", "continued", "", INSIDE),
    ("scorer", "hangs", "generation", "continued", "", INSIDE),
    ("tracker", "exception", "start update end", "continued", PURPOSE, {**INSIDE, "fresh": True}),
    ("tracker", "hangs", "update", "continued", "did not return", {**INSIDE, "fresh": True, "said_at_end": True}),
    ("raylet", "SIGKILL", "start generation update checkpoint", "stopped", "rlsdk: .{0,80}raylet", {}),
    ("raylet", "SIGSTOP and SIGCONT", "generation", "continued", "", {}),
    ("gcs_server", "SIGKILL", "generation", "stopped", "rlsdk: .{0,80}GCS", {}),
)
CELLS = {
    cell.name: cell
    for who, what, moments, end, says, more in _TABLE
    for cell in (Cell(who=who, what=what, when=when, end=end, says=says, **more) for when in moments.split())
}
