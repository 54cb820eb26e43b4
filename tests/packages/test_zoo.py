"""The zoo, a package of policy losses unknown to the core: installed, listed, loaded by name, explained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages.conftest import write_config

pytestmark = pytest.mark.slow  # pip builds and installs the package
ZOO = Path(__file__).resolve().parents[2] / "plugins" / "rlsdk-zoo"
ALGORITHMS = ["zoo/chord_mu", "zoo/dppo", "zoo/kimi", "zoo/maxrl", "zoo/mix_chord", "zoo/rec", "zoo/sppo", "zoo/vespo"]
NAMES = ["zoo/dppo", "zoo/kimi", "zoo/mix_chord", "zoo/rec", "zoo/sppo", "zoo/vespo"]
CONFIG = {
    "name": "zoo",
    "tasks": {"train": {"use": "countdown", "split": "train", "size": 64}},
    "reward": "countdown",
    "steps": 2,
    "engine": "transformers",
    "placement": {"device": "cpu"},
}


@pytest.fixture(scope="module")
def environment(install):
    """An environment with only the zoo, instead of the one with two labs."""
    return install(ZOO)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration whose algorithm is left to the test."""
    return write_config(tmp_path, CONFIG)


def test_it_is_listed_from_metadata(rlsdk):
    (entry,) = (e for e in json.loads(rlsdk("plugins", "--json").stdout) if e["plugin"] == "zoo")
    assert (entry["distribution"], entry["module"], entry["broken"]) == ("rlsdk-zoo", "rlsdk_zoo", None)
    assert entry["version"] == "0.1.0"


def test_it_shows_losses_and_algorithms(rlsdk):
    found = json.loads(rlsdk("plugins", "zoo", "--json").stdout)
    assert found["broken"] == []
    others = (("advantage", ["zoo/maxrl"]), ("correction", ["zoo/off_policy_mask", "zoo/rejection"]))
    others += (("optimizer", ["zoo/lion", "zoo/muon"]),)
    for kind, names in (("policy_loss", NAMES), ("algorithm", ALGORITHMS), *others):
        assert [c["name"] for c in found["components"] if c["kind"] == kind] == names
    (kimi,) = (c for c in found["components"] if c["name"] == "zoo/kimi" and c["kind"] == "algorithm")
    assert kimi["parts"]["policy_loss"] == "zoo/kimi(tau=0.1, level=sequence)"


def test_it_is_loaded_by_name(environment, tmp_path):
    code = (
        "import torch, rlsdk\n"
        "p, q = torch.tensor([-0.5, -1.0]), torch.tensor([-0.6, -0.9])\n"
        "x = rlsdk.LossInputs(p, q, torch.ones(2), torch.ones(2).bool(), torch.zeros(2).long())\n"
        "loss, metrics = rlsdk.load('policy_loss', 'zoo/sppo', clip=0.3)(x)\n"
        "print([round(v, 6) for v in loss.tolist()])\n"
        "print([n for n in rlsdk.names('policy_loss') if '/' in n])\n"
        "print(rlsdk.load('algorithm', 'zoo/vespo').policy_loss.name)\n"
    )
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    assert ran.stdout.splitlines() == ["[-0.1, 0.1]", str(NAMES), "zoo/vespo"]


@pytest.mark.parametrize("name", NAMES)
def test_explain_resolves_its_algorithms(rlsdk, config, name):
    found = json.loads(rlsdk("explain", config, f"algorithm={name}", "--json").stdout)["plan"]
    assert found["algorithm"]["name"] == name
    assert found["algorithm"]["policy_loss"].startswith(f"{name}(")
    assert found["plugins"]["zoo"].startswith("rlsdk-zoo 0.1.0 ")


def test_explain_shows_its_schedule(rlsdk, config):
    found = json.loads(rlsdk("explain", config, "algorithm=zoo/chord_mu", "--json").stdout)["plan"]["algorithm"]
    assert found["policy_loss"].startswith("mix(mu={from: 0.9, to: 0.05, over: 200, shape: cosine}, ")


def test_it_conforms(rlsdk):
    found = json.loads(rlsdk("check", "zoo", "--json").stdout)
    assert (found["conforms"], found["counts"]["skipped"]) == (True, 0)
    assert {f["component"] for f in found["findings"] if f["property"] == "micro-batches"} == {
        *NAMES,
        "zoo/off_policy_mask",
        "zoo/rejection",
    }


def test_a_partial_override_merges(rlsdk, config):
    settings = ["algorithm=zoo/kimi", "algorithm.policy_loss.tau=0.5"]
    found = json.loads(rlsdk("explain", config, *settings, "--json").stdout)["plan"]
    assert found["algorithm"]["policy_loss"] == "zoo/kimi(tau=0.5, level=sequence)"
    assert found["algorithm"]["aggregate"] == "seq-mean-token-sum"
