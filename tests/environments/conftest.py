"""A cluster, workers, and generator runs with scripted policies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

import rlsdk
from rlsdk.contracts import RewardSpec, Sampling
from rlsdk.environments.local import LocalEnvBackend
from rlsdk.environments.pool import EnvWorkerPool
from rlsdk.plugins import Plugins
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.generator import RolloutGenerator
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.testing import ScriptedPolicy
from rlsdk.types import Group, Task
from tests.rollout.codecs import plain

LAB = Path(__file__).with_name("worlds_lab.py")


@attrs.define
class Stage:
    """Plays tasks on a script, in workers or in this process."""

    plugins: Plugins
    worlds: Any
    generator: RolloutGenerator

    def task(self, seed: int, environment: str = "plain", **options: Any) -> Task:
        """A task that names an environment of the lab."""
        metadata = {"seed": seed, "environment": {"use": f"worlds_lab/{environment}", **options}}
        return Task(id=f"{environment}-{seed}", prompt="", metadata=metadata, source=environment)

    async def play(
        self, tasks: Sequence[Task], script: Callable[[str], str] = lambda _: "1", group_size: int = 1
    ) -> list[Group]:
        """Their groups."""
        policy: Any = ScriptedPolicy(plain(), script)
        setting = RolloutContext(
            codec=plain(), client=policy, sampling=Sampling(max_tokens=8), max_length=256, environments=self.worlds
        )
        return await self.generator.produce(tasks, setting, group_size, "test")


def stage(worlds: Any, plugins: Plugins, **options: Any) -> Stage:
    """With the workflow `environment`, and the environments' rewards."""
    workflow = plugins.resolve(plugins.reference("workflow", "environment", options))
    scorer = Scorer([RewardTerm(RewardSpec("environment"), rlsdk.load("reward", "environment"))])
    return Stage(plugins, worlds, RolloutGenerator(workflow, scorer, 0))


@pytest.fixture
def local() -> Callable[..., Stage]:
    """Stages in this process."""
    plugins = Plugins([LAB])
    return lambda **options: stage(LocalEnvBackend(plugins), plugins, **options)


@pytest.fixture
def in_workers(cluster: None, tmp_path: Path) -> Callable[..., Any]:
    """`in_workers(body, workers=1, …)`: awaits `body(stage)` with workers that end afterwards."""
    plugins = Plugins([LAB])

    def run(body: Callable[[Stage], Awaitable[Any]], step_timeout: float = 30.0, **options: Any) -> Any:
        async def inside() -> Any:
            pool = EnvWorkerPool(plugins, log_dir=tmp_path, **options)
            try:
                return await body(stage(pool, plugins, step_timeout=step_timeout))
            finally:
                pool.close()

        return asyncio.run(inside())

    return run
