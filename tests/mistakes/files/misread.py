import rlsdk
from rlsdk.contracts import Finding, History


@rlsdk.diagnosis("spikes")
def spikes(history: History) -> Finding | None:
    """The gradient norm is ten times its median."""
    norm = history["actor/gradnorm"]
    if not history.current(norm, 5) or norm.values[-1] < 10 * norm.median:
        return None
    return Finding("the gradient norm is ten times its median", "lower learner.grad_clip", metric="actor/gradnorm")


@rlsdk.diagnosis("slow_tools", metrics=("workflow/tool_seconds", "lab/queue"))
def slow_tools(history: History) -> Finding | None:
    """Tools wait longer than a minute."""
    queue = history["lab/queue"]
    return Finding("tools wait", "add workers") if history.current(queue, 3) and queue.values[-1] > 60 else None
