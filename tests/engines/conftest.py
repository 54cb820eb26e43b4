"""One tiny model, one Ray cluster and one vLLM process for all engine tests of a session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import tiny

from rlsdk.cluster.actors import kill
from rlsdk.contracts import ActorSpec, Adapter, Model

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
    engine.start(model, ActorSpec(role="engine"))
    yield Subject("transformers", lambda body, *args: body(engine, *args))
    engine.stop()


Launched = Callable[..., AbstractContextManager[Subject]]


@pytest.fixture(scope="session")
def python() -> Iterator[Mapping[str, str]]:
    """Command by which Ray starts a role's workers as in a training: forked from a process that has their imports."""
    from rlsdk.cluster.template import template
    from rlsdk.config import check

    quickstart = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
    with template(check(quickstart, ["engine=vllm"])) as commands:
        yield commands


@pytest.fixture(scope="session")
def launched(model: Model, cluster: None, python: Mapping[str, str]) -> Launched:
    """Starts an engine in an actor, vLLM if no other: `with launched(folder, options, adapter, name=…, model=…)`.

    Its caches lie below `cache` of the folder.
    """
    import ray

    from rlsdk.engines.starting import launch
    from rlsdk.plugins import Plugins

    @contextmanager
    def start(
        folder: Path,
        options: Mapping[str, Any],
        adapter: Adapter | None = None,
        *,
        name: str | type = "vllm",
        model: Model = model,
    ) -> Iterator[Subject]:
        place = ActorSpec(role="engine", cache=str(folder / "cache"), threads=1, cpus=os.cpu_count() or 1)
        engine = Plugins().reference("engine", name, options)
        compiles = "TORCHDYNAMO_DISABLE" not in Plugins().resolve(engine).environment(
            place
        )  # set before torch is imported
        command = "" if compiles else python.get("engine", "")
        actor = launch(engine, place, log_path=folder / "engine.log", python=command)

        def run(body: Callable[..., Any], *args: Any) -> Any:
            return ray.get(actor.__ray_call__.remote(lambda owner: body(owner._engine, *args)))

        try:
            ray.get(actor.start.remote(model, place, adapter))
            address = ray.get_runtime_context().gcs_address
            ray.cloudpickle.register_pickle_by_value(tiny)
            yield Subject(str(name), run, actor)
            # A test may have ended this Ray, and another may have started one since.
            if ray.is_initialized() and ray.get_runtime_context().gcs_address == address:
                ray.get(actor.stop.remote())
        finally:
            kill(actor)

    return start


@pytest.fixture(scope="session")
def vllm_engine(launched: Launched, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with launched(tmp_path_factory.mktemp("vllm"), {"max_num_seqs": EXCESS}) as found:
        yield found


@pytest.fixture(scope="session")
def parallel_vllm_engine(launched: Launched, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """One whose layers two processes divide."""
    options = {"max_num_seqs": EXCESS, "tensor_parallel_size": 2}
    with launched(tmp_path_factory.mktemp("parallel-vllm"), options) as found:
        yield found


@pytest.fixture(
    params=[
        "transformers",
        pytest.param("vllm", marks=pytest.mark.stack),
        pytest.param("parallel_vllm", marks=[pytest.mark.stack, pytest.mark.slow]),
    ]
)
def subject(request: pytest.FixtureRequest, model: Model) -> Iterator[Subject]:
    """Each engine in turn, with nothing running and the folder's weights as version 0."""
    found: Subject = request.getfixturevalue(f"{request.param}_engine")
    found.run(_reset, tiny.original(model))
    yield found


def _reset(engine: Any, weights: Any) -> None:
    engine.abort()
    engine.load_weights(weights)
