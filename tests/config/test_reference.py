"""The reference of configuration keys is complete, and the schema for editors agrees with the check."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from jsonschema import Draft7Validator
from omegaconf import OmegaConf

from rlsdk.cli import root
from rlsdk.cli.config import offered
from rlsdk.config.json_schema import json_schema
from rlsdk.config.reference import UNITS, settings
from rlsdk.options import type_name
from rlsdk.plugins import CORE, Plugins

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(p for p in (ROOT / "examples").rglob("*.yaml") if "cluster" not in p.parts)
WITHOUT_UNIT = {"seed"}
BROKEN = {
    "unknown key": "stpes: 10",
    "unknown key of a section": "sampling: {temprature: 1}",
    "unknown option": "learner: {lrr: 1.0e-5}",
    "unknown option of a named component": "engine: {use: vllm, max_seqs: 3}",
    "unknown component": "algorithm: gprp",
    "unknown tracker in a list": "trackers: [wandb, tensorbord]",
    "text for a number": "batch_size: many",
    "below the least": "batch_size: 0",
    "outside of an option's limits": "learner: {use: deepspeed, betas: [0.9, 1.5]}",
    "not one of the choices": "model: {path: model, dtype: bf16}",
    "null where text is needed": "model: {path: null}",
    "a wrong part of the algorithm": "algorithm: {policy_loss: {clip_hihg: 0.2}}",
    "a part of another kind": "algorithm: {use: grpo, advantage: ppo}",
    "a wrong key beside a reward": "reward: [{use: countdown, wieght: 1}]",
    "an option that is missing": "tasks: {train: countdown, eval: {use: jsonl}}",
    "a schedule without an end": "algorithm: {kl_coef: {from: 0.1, over: 5}}",
}


@pytest.fixture(scope="module")
def schema():
    found = json_schema(offered(Plugins(), [CORE]))
    Draft7Validator.check_schema(found)
    return found


@pytest.fixture(scope="module")
def faults(schema):
    def of(text):
        return list(Draft7Validator(schema).iter_errors(OmegaConf.to_container(OmegaConf.create(text))))

    return of


@pytest.fixture(scope="module")
def tool():
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("docs_configuration", ROOT / "tools" / "docs_configuration.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_every_key_has_a_meaning_and_every_number_a_unit():
    found = settings()
    assert [s.path for s in found if not s.help] == []
    numbers = {s.path for s in found if {"int", "float"} & set(type_name(s.type).split())}
    assert numbers - WITHOUT_UNIT == {path for path in UNITS if path in numbers}
    assert set(UNITS) <= {s.path for s in found}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.relative_to(ROOT / "examples").as_posix())
def test_the_schema_admits_the_example(path, faults):
    assert faults(path.read_text()) == []


@pytest.mark.parametrize("wrong", BROKEN.values(), ids=BROKEN)
def test_the_schema_refuses(wrong, faults):
    whole = OmegaConf.merge({"name": "a", "model": "model", "tasks": {"train": "countdown"}}, OmegaConf.create(wrong))
    assert faults(OmegaConf.to_yaml(whole))


@pytest.mark.parametrize(
    "right",
    [
        "reward: {use: mylab/exact, anything: 3}",
        "reward: rewards.py:exact",
        "algorithm: {policy_loss: {clip_high: 0.28}, kl_coef: {from: 0, to: 0.1, over: 5, shape: cosine}}",
        "batch_size: ${group_size}",
        "production: {max_staleness: 1}",
        "learner: {lr: 1e-5}",
        "eval: {environments: null, limit: null}",
        "tasks: {train: [countdown, {use: jsonl, path: a.jsonl, weight: 2, source: a}], eval: null}",
    ],
)
def test_the_schema_admits(right, faults):
    least = {"name": "a", "model": "model", "tasks": {"train": "countdown"}}
    assert faults(OmegaConf.to_yaml({**least, **OmegaConf.to_container(OmegaConf.create(right))})) == []


def test_the_schema_knows_the_options_of_installed_plugins(site):
    lab = "import rlsdk\n@rlsdk.reward('exact')\ndef exact(rollout, *, scale: float = 1.0) -> float:\n    'Exact.'\n"
    site.install("rlsdk-lab", {"lab.py": lab}, plugins={"lab": "lab"})
    ran = CliRunner().invoke(root, ["config", "--schema"])
    assert ran.exit_code == 0, ran.stderr
    check = Draft7Validator(json.loads(ran.stdout))
    least = {"name": "a", "model": "model", "tasks": {"train": "countdown"}}
    assert check.is_valid({**least, "reward": {"use": "lab/exact", "scale": 2}})
    assert not check.is_valid({**least, "reward": {"use": "lab/exact", "scael": 2}})


def test_a_new_config_names_the_schema_and_fits_it(tmp_path, monkeypatch, schema):
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(root, ["new", "reward", "brief"])
    assert ran.exit_code == 0, ran.stderr
    (file,) = tmp_path.rglob("*.yaml")
    assert file.read_text().startswith("# yaml-language-server: $schema=rlsdk.schema.json\n")
    assert Draft7Validator(schema).is_valid(OmegaConf.to_container(OmegaConf.load(file)))


def test_the_committed_pages_are_up_to_date(tool):
    stale = [name for name, text in tool.committed().items() if (ROOT / "docs" / name).read_text() != text]
    assert stale == [], "run `make configuration`"
