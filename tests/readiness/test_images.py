"""A plan that passes images to components without vision is refused before anything starts."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from rlsdk import nano
from rlsdk.config import check
from rlsdk.readiness.checks import examine
from tests.vision_models import make

LAB = """
import rlsdk

@rlsdk.environment("film")
class Film:
    def __init__(self, *, silent: bool = False):
        self.silent = silent

    @property
    def shows_images(self):
        return not self.silent

    def reset(self, seed):
        return rlsdk.Observation("1")

    def step(self, text):
        return rlsdk.Step(rlsdk.Observation("2"), terminated=True)
"""
BASE = [
    "name=run",
    "tasks.train={use: environments, environments: {film: {use: film_lab/film}}, groups: 1, prompt: '1'}",
    "workflow=environment",
    "max_prompt_tokens=16",
    "model.max_length=96",
    "sampling.max_tokens=4",
    "steps=1",
    "batch_size=1",
    "group_size=2",
    "engine=transformers",
    "placement.device=cpu",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees, one that does not, and the plugin."""
    folder = tmp_path_factory.mktemp("images")
    make(folder / "sees", "qwen2_5_vl")
    nano.create(folder / "text")
    (folder / "film_lab.py").write_text(LAB)
    return folder


def faults(folder: Path, *settings: str, model: str = "sees") -> list[str]:
    source = {"model": {"path": str(folder / model)}, "out": str(folder)}
    plan = check(source, [*BASE, *settings], plugins=[folder / "film_lab.py"])
    return [str(each) for each in examine(plan, starts=False).faults]


def test_a_model_that_sees_has_no_faults(folder: Path) -> None:
    assert faults(folder) == []


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("engine.compile=true", "shows images: 'core/transformers': compile: true cannot read images"),
        ("learner.rows=packed", "reads images, and learner.rows=packed would mix their positions"),
        ("learner.compile=true", "reads images, and compile: true is not tested with them"),
        ("learner.lora={rank: 2, alpha: 4, targets: [qkv]}", "no layer is called qkv"),  # one of the tower is
        ("learner.sequence_parallel=2", "reads images, and sequence_parallel: 2 would cut them"),
        (
            "model.exact=true",
            "model.exact: a Qwen2_5_VLForConditionalGeneration reads images, which no exact pass does",
        ),
        ("tasks.train.form=text", "tasks: environment 'film_lab/film' shows images, but the prompt is text"),
    ],
)
def test_plans_with_images_that_cannot_work_are_faults(folder: Path, setting: str, says: str) -> None:
    assert any(says in fault for fault in faults(folder, setting)), faults(folder, setting)


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM's build for CPUs")
def test_vllm_on_a_cpu_needs_torchvision_and_does_not_read_images_as_gemma_does(folder: Path) -> None:
    make(folder / "gemma", "gemma3")
    torchvision = "needs torchvision for model type 'qwen2_5_vl', but it is not installed here"
    found = faults(folder, "engine=vllm")
    assert [torchvision in fault for fault in found] == [True] * (find_spec("torchvision") is None)
    says = "does not support bidirectional attention between the tokens of an image, which model type 'gemma3' uses"
    assert any(says in fault for fault in faults(folder, "engine=vllm", model="gemma"))


def test_a_model_of_text_is_refused_only_if_images_are_shown(folder: Path) -> None:
    assert any(
        "model.path: environment 'film_lab/film' shows images: a message contains an image, but the model" in fault
        for fault in faults(folder, "tasks.train.form=text", model="text")
    )
    silent = "tasks.train.environments.film={use: film_lab/film, silent: true}"
    assert faults(folder, "tasks.train.form=text", silent, model="text") == []
