"""Helpers of the benchmarks: a random model, prompts, runs of rlsdk and TRL, a clock that replays seconds, records."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from rlsdk.runlog.query import query
from tools.bench import facts, results

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TRL_VENV = ROOT / ".venv-trl"
TRL_PACKAGES = ("trl==1.16.*", "transformers>=5.16.1,<5.20")  # the range of transformers that rlsdk runs with
WARM_UP = 3
"""Steps left out at the beginning of each run: compilation, first allocations, caches."""
RESULTS = Path(os.environ.get("RLSDK_BENCH_RESULTS", ROOT / "runs" / "benchmarks"))
"""Folder of the JSON files: `make bench` names docs/benchmarks, whose files are committed."""
LR = 1e-5
"""So small that the model, and with it the lengths, stay as they are."""


@attrs.frozen(kw_only=True)
class Work:
    """The work of one step, which is equal for all compared trainers.

    Attributes:
        model: Folder of the model.
        prompts: JSON list of the prompts.
        tasks: Prompts per step.
        group: Completions of each.
        max_tokens: Of one completion.
        steps: Steps of one run, those of the warm-up included.
    """

    model: Path
    prompts: Path
    tasks: int
    group: int
    max_tokens: int
    steps: int

    @property
    def completions(self) -> int:
        """Of one step."""
        return self.tasks * self.group


@attrs.frozen
class Steps:
    """Steps after the warm-up.

    Attributes:
        seconds: Of each.
        length: Mean tokens of a completion.
        truncated: Share of completions that reach the limit.
        lengths: Of single completions: all, or those of the last step.
        metrics: Lines of `metrics.jsonl`; none for others than rlsdk.
    """

    seconds: list[float]
    length: float
    truncated: float
    lengths: list[int]
    metrics: list[Mapping[str, Any]] = attrs.field(factory=list)

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)

    @classmethod
    def join(cls, runs: Iterable[Steps]) -> Steps:
        """Several runs of the same work as one."""
        runs = list(runs)
        return cls(
            seconds=[s for run in runs for s in run.seconds],
            length=statistics.mean(run.length for run in runs),
            truncated=statistics.mean(run.truncated for run in runs),
            lengths=[n for run in runs for n in run.lengths],
            metrics=[m for run in runs for m in run.metrics],
        )


class Replay:
    """A clock for pytest-benchmark that shows seconds measured elsewhere: inside a training, step by step."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now

    def show(self, benchmark: Any, seconds: list[float]) -> None:
        """Give a benchmark, marked `timer=` this clock, one round for each of `seconds`."""
        left = iter(seconds)

        def step() -> None:
            self.now += next(left)

        benchmark.pedantic(step, rounds=len(seconds), iterations=1)


REPLAY = Replay()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Benchmarks run where they are asked for, `-m bench`, and show seconds that were measured inside a training."""
    own = [item for item in items if HERE in item.path.parents]
    for item in own:
        item.add_marker(pytest.mark.bench)
        item.add_marker(pytest.mark.timeout(1800))
        item.add_marker(pytest.mark.benchmark(timer=REPLAY))
    if "bench" not in config.option.markexpr:
        items[:] = [item for item in items if item not in own]
        config.hook.pytest_deselected(items=own)


@pytest.fixture
def show(benchmark: Any, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Report the seconds of steps, with further figures."""

    def report(seconds: list[float], **figures: Any) -> None:
        request.node.user_properties.append(("figures", figures))
        benchmark.extra_info.update({"load_average": os.getloadavg()[0], **figures})
        REPLAY.show(benchmark, seconds)
        print(json.dumps(benchmark.extra_info))

    return report


@pytest.fixture
def check(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Record a figure of `BENCHMARK`, the module's, with the limit that is asserted, and assert it.

    `check("times as fast as TRL", 1.04, case="short", at_least=1.0, figures={…})`; what `show` was given is recorded,
    too. A figure that fails is recorded before it fails the test.
    """
    module, load = request.node.path.stem.removeprefix("test_"), facts.load()
    parameters = request.node.callspec.id if hasattr(request.node, "callspec") else ""

    def record(
        figure: str,
        value: float,
        *,
        case: str = parameters,
        at_least: float | None = None,
        at_most: float | None = None,
        figures: Mapping[str, Any] | None = None,
    ) -> None:
        shown = {
            key: v for name, found in request.node.user_properties if name == "figures" for key, v in found.items()
        }
        passed = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        result = {
            "test": f"{request.node.path.name}::{request.node.name}",
            "benchmark": request.module.BENCHMARK,
            "case": case,
            "figure": figure,
            "value": round(float(value), 4),
            "at_least": at_least,
            "at_most": at_most,
            "passed": bool(passed),
            "figures": {**shown, **(figures or {})},
            "load_average": {"before": load, "after": facts.load()},
            **facts.about(),
            "source": None,
        }
        results.write(RESULTS / f"{module}.json", [result])
        assert passed, f"{case}: {figure} is {value:.4g}; expected at least {at_least}, at most {at_most}"

    return record


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nano model with random weights: it ends a text with a probability of about 1/120 a token."""
    from rlsdk import nano

    folder = tmp_path_factory.mktemp("nano")
    nano.create(folder)
    return folder


@pytest.fixture(scope="session")
def endless_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, but it never ends a text: all tokens share a direction, in which the end points the other way."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("endless")
    tokenizer, changed = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        embeddings = changed.get_input_embeddings().weight  # of the output too
        embeddings[:, 0] = 1.0
        embeddings[tokenizer.eos_token_id, 0] = -30.0
    tokenizer.save_pretrained(folder)
    changed.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 prompts of eight tokens."""
    draw = random.Random(0).randint
    texts = [f"{draw(1, 20)},{draw(1, 20)},{draw(1, 20)}>{draw(1, 100)}:" for _ in range(256)]
    path = tmp_path_factory.mktemp("prompts") / "prompts.json"
    path.write_text(json.dumps(texts), encoding="utf-8")
    return path


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Steps]:
    """Runs `rlsdk train`: `train(work, engine="vllm", …)` with further settings by path."""
    runs: Iterator[int] = iter(range(1000))

    def run(work: Work, **settings: Any) -> Steps:
        return rlsdk_steps(work, tmp_path / f"run-{next(runs)}", settings)

    return run


def rlsdk_steps(work: Work, folder: Path, settings: Mapping[str, Any]) -> Steps:
    """One run of rlsdk: GRPO without a reference, one optimiser step for each generation, nothing filtered."""
    folder.mkdir()
    config = {
        "name": "run",
        "out": str(folder),
        "model": {"path": str(work.model), "max_length": work.max_tokens + 16},
        "tasks": {"train": {"use": "workload/prompts", "path": str(work.prompts)}},
        "max_prompt_tokens": 15,
        "reward": "workload/hash",
        "algorithm": {"use": "grpo", "kl_coef": 0.0, "aggregate": "token-mean", "filters": []},
        "sampling": {"temperature": 1.0, "max_tokens": work.max_tokens},
        "steps": work.steps,
        "batch_size": work.tasks,
        "group_size": work.group,
        "old_logprobs": "rollout",
        "learner": {"use": "deepspeed", "lr": LR, "rows": "shared", "micro_batch_tokens": 6000},
        "placement": {"engines": 2, "engine_threads": 1, "learners": 2, "learner_threads": 1},
        "checkpoint": {"export": "never"},
        "save_rollouts": work.steps,  # the last step's: a look at the lengths
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    changes = [f"{path}={value}" for path, value in settings.items()]
    plugin = ["--plugin", str(HERE / "workload.py")]
    call([sys.executable, "-m", "rlsdk.cli", "train", str(file), *changes, *plugin])
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines][WARM_UP:-1]  # the last step saves
    return Steps(
        seconds=[m["time/step"] for m in metrics],
        length=statistics.mean(m["rollouts/length"] for m in metrics),
        truncated=statistics.mean(m["rollouts/truncated"] for m in metrics),
        lengths=[row["tokens"] for row in query(folder / "run", "step is not null")],
        metrics=metrics,
    )


@pytest.fixture(scope="session")
def trl() -> Callable[..., Steps]:
    """Runs TRL: `trl(work, threads=2, …)`; the first use makes its environment."""
    python = trl_python()

    def run(
        work: Work,
        *,
        threads: int,
        micro_batch: int,
        attention: str = "sdpa",
        paged: bool = False,
        compiled: bool = False,
        steps: int | None = None,
    ) -> Steps:
        options = {
            "model": str(work.model),
            "prompts": str(work.prompts),
            "completions": work.completions,
            "group": work.group,
            "max_tokens": work.max_tokens,
            "lr": LR,
            "steps": steps or work.steps,
            "seed": 0,
            "threads": threads,
            "micro_batch": micro_batch,
            "attention": attention,
            "paged": paged,
            "compiled": compiled,
        }
        command = [str(python), str(HERE / "trl_step.py"), json.dumps(options)]
        found = json.loads(call(command, OMP_NUM_THREADS=str(threads)).splitlines()[-1])
        lengths = [n for each in found["lengths"][WARM_UP:] for n in each]
        return Steps(
            seconds=found["seconds"][WARM_UP:],
            length=statistics.mean(lengths),
            truncated=statistics.mean(n == work.max_tokens for n in lengths),
            lengths=lengths,
        )

    return run


def trl_python() -> Path:
    """The Python of TRL's environment, which is made when it is not there."""
    python, stamp = TRL_VENV / "bin" / "python", TRL_VENV / ".installed"
    wanted = "\n".join(TRL_PACKAGES)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    torch = "import sys; sys.path.insert(0, 'tools'); import install; sys.exit(not install.install_torch())"
    call([sys.executable, "-m", "venv", str(TRL_VENV)])
    call([str(python), "-c", torch])
    call([str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *TRL_PACKAGES])
    stamp.write_text(wanted, encoding="utf-8")
    return python


def call(command: list[str], **variables: str) -> str:
    """Run a command to its end and return its output; fail with its error output."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")} | variables
    if command[0] == sys.executable:
        environment["PYTHONPATH"] = str(ROOT)
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout
