"""The workers of a run that host environments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from rlsdk.config import Plan
from rlsdk.config.schema import EnvironmentsSection
from rlsdk.environments.fleet import EnvWorkerPool


@attrs.frozen
class EnvWorkerPools:
    """Workers for training, and those for evaluation where it has its own."""

    train: EnvWorkerPool
    eval: EnvWorkerPool | None


@contextmanager
def world_workers(plan: Plan) -> Iterator[EnvWorkerPools]:
    """Workers that start when they are needed and end with the block."""

    def fleet(section: EnvironmentsSection, name: str) -> EnvWorkerPool:
        options = attrs.asdict(section)
        return EnvWorkerPool(plan.plugins, **options, name=name, log_dir=plan.folder.resolve() / "logs")

    own = plan.config.eval.environments
    fleets = EnvWorkerPools(
        fleet(plan.config.environments, "environments"), None if own is None else fleet(own, "eval-environments")
    )
    try:
        yield fleets
    finally:
        fleets.train.close()
        if fleets.eval is not None:
            fleets.eval.close()
