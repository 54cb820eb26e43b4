"""One tiny model, one Ray cluster and one vLLM process for all engine tests of a session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import tiny

from rlsdk.contracts import Model, Place

EXCESS = 24
"""`max_num_seqs` of the engines under test: small, so that some tests make requests wait."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny.make_model(tmp_path_factory.mktemp("tiny"))


@attrs.frozen
class Subject:
    """An engine under test: `run(body, *args)` calls `body(engine, *args)` where the engine lives."""

    name: str
    run: Callable[..., Any]
    actor: Any = None


@pytest.fixture(scope="session")
def transformers_engine(model: Model) -> Iterator[Subject]:
    from rlsdk.engines.transformers import Transformers

    engine = Transformers(max_num_seqs=EXCESS)
    engine.start(model, Place(role="engine"))
    yield Subject("transformers", lambda body, *args: body(engine, *args))
    engine.stop()


@pytest.fixture(scope="session")
def vllm_engine(model: Model, cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    import ray

    from rlsdk.engines.actor import launch
    from rlsdk.plugins import Plugins

    folder = tmp_path_factory.mktemp("vllm")
    reference = Plugins().reference("engine", "vllm", {"max_num_seqs": EXCESS})
    place = Place(role="engine", cache=str(folder / "cache"), threads=1, cpus=os.cpu_count() or 1)
    actor = launch(reference, place, name="engine-under-test", log_path=folder / "engine.log")
    ray.get(actor.start.remote(model, place))
    ray.cloudpickle.register_pickle_by_value(tiny)

    def run(body: Callable[..., Any], *args: Any) -> Any:
        return ray.get(actor.__ray_call__.remote(lambda owner: body(owner._engine, *args)))

    yield Subject("vllm", run, actor)
    ray.get(actor.stop.remote())
    ray.kill(actor)


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.stack)])
def subject(request: pytest.FixtureRequest, model: Model) -> Iterator[Subject]:
    """Each engine in turn, with nothing running and the folder's weights as version 0."""
    found: Subject = request.getfixturevalue(f"{request.param}_engine")
    found.run(_reset, tiny.original(model))
    yield found


def _reset(engine: Any, weights: Any) -> None:
    engine.abort()
    engine.load_weights(weights)
