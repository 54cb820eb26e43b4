"""Start and end the Ray actors of a run, all in one way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.isolation.process import redirect
from rlsdk.isolation.vitals import Identity, identity
from rlsdk.isolation.watching import forget_actor, watch_actor


class RunActor:
    """Base of the actors that the watchdog watches: each has a log file, and identifies its process."""

    def __init__(self, log_path: str = "") -> None:
        """Send what this process prints to a file.

        Args:
            log_path: Path of the file; empty leaves the output to Ray.
        """
        if log_path:
            redirect(log_path)

    def identity(self) -> Identity:
        """Identify this process, which has it write its stacks on request; an answer shows that it is not stuck."""
        import ray

        return identity(ray.get_runtime_context().get_node_id())


def spawn(
    cls: type,
    *arguments: Any,
    cpus: float = 0.0,
    gpus: float = 0.0,
    resources: Mapping[str, float] | None = None,
    environment: Mapping[str, str] | None = None,
    name: str = "",
    namespace: str = "",
    node: str = "",
    concurrency: int = 0,
    watched_as: str = "",
    log_path: object = "",
    replaced: bool = False,
) -> Any:
    """Start an actor, which is not restarted by Ray, and return its handle.

    Args:
        cls: Class of the actor.
        *arguments: Arguments of its constructor.
        cpus: Cores that Ray reserves.
        gpus: GPUs that Ray reserves; a fraction if they are shared.
        resources: Further resources that Ray reserves, by name.
        environment: Environment variables of its process.
        name: Actor name in Ray's listings; empty for none.
        namespace: Ray namespace of that name; empty for the driver's.
        node: Id of the node to run on; empty leaves that to Ray.
        concurrency: Maximum concurrent calls; 0 for Ray's default.
        watched_as: Name in the watchdog's messages, such as `learner rank 0`; empty for an actor that is not watched.
        log_path: File that takes what it prints, for those messages.
        replaced: True if another takes its place when it dies, so that the run need not end.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options: dict[str, Any] = {
        "max_concurrency": concurrency,
        "name": name,
        "namespace": namespace,
        "resources": dict(resources or {}),
        "runtime_env": {"env_vars": dict(environment)} if environment else {},
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False) if node else None,
    }
    given = {option: value for option, value in options.items() if value}
    actor = ray.remote(cls).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, **given).remote(*arguments)
    if watched_as:
        watch_actor(watched_as, actor, log_path or "Ray's", replaced=replaced)
    return actor


def kill(actor: Any) -> None:
    """End an actor, also one that cannot be reached or has died; the watchdog does not report it."""
    import ray

    forget_actor(actor)
    ray.kill(actor)
