"""`rlsdk check`, and the pytest plugin, on a plugin with a good and a bad loss."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlsdk.cli import root
from tests.warm import WarmPython

ROOT = Path(__file__).resolve().parents[2]
LAB = '''
import rlsdk


@rlsdk.policy_loss("plain")
def plain(x):
    """The plain policy gradient."""
    return -x.advantages * x.logprobs


@rlsdk.policy_loss("leaky")
def leaky(x, *, scale: float = 1.0):
    """Divides by the tokens of the micro-batch.

    Args:
        scale: Factor.
    """
    return -scale * x.advantages * x.logprobs / x.loss_mask.sum().clamp(min=1)


@rlsdk.reward("needy")
def needy(rollout, *, path: str) -> float:
    """Needs a file.

    Args:
        path: A file.
    """
    return float(len(path))
'''


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """The file, in the current folder."""
    (tmp_path / "lab.py").write_text(LAB)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "lab.py"


def check(*arguments, status):
    ran = CliRunner().invoke(root, ["check", *map(str, arguments)])
    assert ran.exit_code == status, ran.output
    return ran.output if status < 2 else ran.stderr


# --- the command


def test_faults_are_shown_with_their_input(lab):
    text = check(lab, status=1)
    assert re.search(r"^lab/plain +21 passed *$", text, re.MULTILINE)
    assert re.search(r"^lab/leaky +20 passed +1 failed +micro-batches *$", text, re.MULTILINE)
    assert re.search(
        rf"^policy_loss lab/leaky \({re.escape(str(lab))}, line \d+\) breaks micro-batches: ", text, re.MULTILINE
    )
    assert "LossInputs: 2 rollouts, 2 tokens, float32" in text
    assert "what to do: " in text
    assert "needs option path (str): --option needy.path=VALUE" in " ".join(text.split())
    assert "3 components" in text.splitlines()[-1]
    assert "1 failed" in text.splitlines()[-1]


def test_one_component_or_kind_may_be_chosen(lab):
    assert "leaky" not in check(lab, "--component", "plain", status=0)
    assert "leaky" not in check(lab, "--component", "lab/plain", status=0)
    assert "plain" not in check(lab, "--kind", "reward", status=0)
    assert "needy" not in check("lab", "--plugin", lab, "--kind", "policy_loss", status=1)


def test_options_are_given_to_components(lab):
    text = check(lab, "--component", "needy", "--option", "needy.path=x", status=0)
    assert "0 skipped" in text
    assert "expected float" in check(lab, "--option", "leaky.scale=much", status=2)
    assert "expected float" not in check(lab, "--option", "leaky.scale=1e-3", status=1)
    assert "COMPONENT.OPTION=VALUE" in check(lab, "--option", "scale=1", status=2)
    assert "no component 'leeky'; did you mean 'leaky'?" in check(lab, "--option", "leeky.scale=1", status=2)


def test_json(lab):
    found = json.loads(check(lab, "--json", status=1))
    assert (found["plugin"], found["conforms"], found["counts"]["failed"]) == ("lab", False, 1)
    (fault,) = (f for f in found["findings"] if f["outcome"] == "failed")
    assert (fault["component"], fault["property"]) == ("lab/leaky", "micro-batches")
    assert fault["given"].startswith("reduced from: three pairs of rollouts\nLossInputs: 2 rollouts")


def test_what_is_not_there(lab):
    text = check("lob", "--plugin", lab, status=2)
    assert "no plugin 'lob'; did you mean 'lab'?" in text
    assert "no component 'lucky'" in check(lab, "--component", "lucky", status=2)
    (lab.parent / "sad.py").write_text("import not_there")
    assert "fails to import" in CliRunner().invoke(root, ["check", "sad.py"]).stderr
    assert CliRunner().invoke(root, ["check", "sad.py"]).exit_code == 1


def test_a_model_without_its_path_and_options_of_models_without_one_are_refused() -> None:
    without = CliRunner().invoke(root, ["check", "model"])
    assert (without.exit_code, "give its folder: rlsdk check model PATH" in without.output) == (2, True)
    options = CliRunner().invoke(root, ["check", "core", "--trace", "--engine", "vllm"])
    assert options.exit_code == 2
    assert "--engine, --trace: only with `model PATH`" in " ".join(options.output.split())


def test_core_conforms_as_the_command_sees_it(lab):
    text = check("core", "--kind", "advantage", status=0)
    assert "grpo" in text
    assert text.splitlines()[-1].startswith("core (rlsdk ")


# --- pytest


PYTEST = ("pytest", "-p", "rlsdk.testing.pytest_plugin", "-p", "no:cacheprovider")
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "PYTEST_ADDOPTS": "",  # options meant for the outer pytest
}


@pytest.fixture(scope="module")
def warm():
    """A process with torch imported, to be forked."""
    process = WarmPython(ENVIRONMENT)
    yield process
    process.close()


@pytest.fixture
def run_pytest(warm, lab):
    """Run pytest in the folder of the plugin, and check its exit status."""

    def run(*arguments, status):
        ran = warm.run(*PYTEST, *arguments, cwd=lab.parent)
        assert ran.returncode == status, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    return run


@pytest.fixture
def tests(lab):
    """A test next to the plugin."""
    (lab.parent / "test_own.py").write_text("def test_own():\n    pass\n")
    return lab.parent


def test_each_property_is_a_test(tests, run_pytest):
    text = run_pytest("-v", "-rs", "--rlsdk-plugin", "lab.py", status=1)
    assert "lab/leaky[policy_loss]::micro-batches FAILED" in text
    assert "lab/plain[policy_loss]::micro-batches PASSED" in text
    assert "lab/needy[reward]::scores SKIPPED" in text
    assert "breaks micro-batches: Splitting the batch (not within groups that it reads)" in text
    assert "LossInputs: 2 rollouts, 2 tokens, float32" in text
    assert "conformance.py" not in text  # no traceback through the suite
    assert "test_own" not in text
    assert "1 failed" in text.splitlines()[-1]


def test_the_named_tests_run_along(tests, run_pytest):
    text = run_pytest("-v", "test_own.py", "--rlsdk-plugin", "lab.py", "-k", "own or gaps", status=0)
    assert "test_own.py::test_own PASSED" in text
    assert "lab/leaky[policy_loss]::gaps PASSED" in text
    assert "micro-batches" not in text


def test_options_reach_the_components(tests, run_pytest):
    arguments = ("--rlsdk-plugin", "lab.py", "--rlsdk-option", "needy.path=x", "-k", "needy")
    assert "skipped" not in run_pytest(*arguments, status=0)


def test_several_plugins_and_the_built_in_one(tests, run_pytest):
    arguments = ("--rlsdk-plugin", "lab.py", "--rlsdk-plugin", "core", "-k", "shapes and policy_loss", "-v")
    text = run_pytest(*arguments, status=0)
    assert "ppo[policy_loss]::shapes PASSED" in text
    assert "lab/plain[policy_loss]::shapes PASSED" in text


def test_an_unknown_plugin_is_a_wrong_command_line(tests, run_pytest):
    text = run_pytest("--rlsdk-plugin", "lob", status=4)
    assert "ERROR: --rlsdk-plugin: unknown plugin 'lob'" in text


def test_without_the_option_nothing_happens(tests):
    (tests / "test_own.py").write_text(
        "import sys\n\ndef test_own():\n"
        "    assert not {'torch', 'numpy', 'rlsdk.batch', 'rlsdk.testing.pytest_items'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-m", *PYTEST]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tests, env=ENVIRONMENT)
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr


def test_the_plugin_may_be_registered_twice(tests, run_pytest):
    """By its entry point and by `-p`, in either order, without tests that run twice."""
    (tests / "conftest.py").write_text(
        "import importlib\n"
        "def pytest_configure(config):\n"
        "    hooks = importlib.import_module('rlsdk.testing.pytest_plugin').hooks\n"
        "    if not config.pluginmanager.is_registered(hooks):\n"
        "        config.pluginmanager.register(hooks, 'rlsdk')\n"
    )
    text = run_pytest("--rlsdk-plugin", "lab.py", "-k", "plain and shapes", "-v", status=0)
    assert text.count("lab/plain[policy_loss]::shapes PASSED") == 1


def reward_file(folder, body):
    file = folder / "odd.py"
    file.write_text(f'import sys, time\nimport rlsdk\n\n@rlsdk.reward("odd")\ndef odd(rollout):\n    {body}\n')
    return file


@pytest.mark.parametrize(
    ("body", "got"),
    [
        ("sys.exit(0)", "SystemExit: 0 ("),
        ("__import__('os')._exit(3)", "SystemExit: os._exit(3) ("),
    ],
)
def test_a_reward_that_exits_does_not_end_the_check(tmp_path, body, got):
    text = check(reward_file(tmp_path, body), status=1)
    assert "breaks scores" in text
    assert f"got: {got}" in text
    assert "odd.py, line 6)" in text


def test_a_reward_that_hangs_is_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr("rlsdk.testing.properties.scoring.SECONDS", 0.1)
    text = check(reward_file(tmp_path, "time.sleep(60)"), status=1)
    assert "expected: an answer within 0.1 s" in text


def test_what_a_component_prints_stays_out_of_the_json(tmp_path):
    file = reward_file(tmp_path, "print('hello'); return 1.0")
    ran = CliRunner().invoke(root, ["check", str(file), "--json"])
    assert json.loads(ran.stdout)["plugin"] == "odd"
    assert "hello" in ran.stderr


def test_a_file_without_components_says_how_to_mark_one(tmp_path):
    file = tmp_path / "plain.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    text = check(file, status=2)
    assert "no component found in" in text
    assert "@rlsdk.reward('NAME')" in text
    file.write_text("import rlsdk\n\n@rlsdk.hookimpl\ndef rlsdk_step_end(step):\n    pass\n")
    assert "its hooks (rlsdk_step_end) are not checked" in " ".join(check(file, status=2).split())
    file.write_text("import rlsdk\n\n@rlsdk.reward('one')\ndef one(rollout):\n    return 1.0\n")
    assert "no filter found in" in check(file, "--kind", "filter", status=2)


NAMED = """
import rlsdk


@rlsdk.reward("exact-match")
def exact(rollout) -> float:
    '''1 for x.'''
    return float(rollout.text == "x")


@rlsdk.workflow("play")
async def played(task, chat):
    '''One answer.'''
    await chat.sample()
    return chat.finish()


def trl(completions, **kwargs):
    return [1.0 for _ in completions]


def solve(task, base_url, api_key):
    return 1.0


def weather(state: str) -> str:
    '''The weather.

    Args:
        state: Name of the state.
    '''
    return "sunny"


def bare(rollout):
    return 1.0


def unmarked(task, chat):
    return chat.finish()
"""


@pytest.mark.parametrize(
    ("name", "kind", "component"),
    [
        ("exact", "reward", "named/exact-match"),
        ("exact-match", "reward", "named/exact-match"),
        ("play", "workflow", "named/play"),
        ("trl", "reward", "foreign"),
        ("solve", "workflow", "agent"),
        ("weather", "workflow", "tools"),
    ],
)
def test_a_name_in_a_file_is_checked_as_what_it_is(tmp_path, name, kind, component):
    (tmp_path / "named.py").write_text(NAMED)
    found = json.loads(check(f"{tmp_path}/named.py:{name}", "--json", status=0))
    assert {(each["kind"], each["component"]) for each in found["findings"]} == {(kind, component)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bare"], "named.py:bare takes rollout like a reward, but is not marked; write @rlsdk.reward('bare') above"),
        (["unmarked"], "takes task, chat like a workflow, but is not marked; write @rlsdk.workflow('unmarked') above"),
        (["bare", "--kind", "filter"], "named.py:bare is not marked; write @rlsdk.filter('bare') above it"),
        (["exact", "--kind", "workflow"], "named.py:exact is a reward"),
        (["exact", "--component", "x"], "named.py:exact already names what is checked"),
        (["exakt"], "named.py has no 'exakt', did you mean 'exact'?"),
        (["trl", "--kind", "workflow"], "tool 'trl': parameter completions must be named and typed"),
    ],
)
def test_a_name_in_a_file_that_cannot_be_checked_says_why(lab, arguments, said):
    lab.with_name("named.py").write_text(NAMED)
    name, *options = arguments
    assert said in check(f"named.py:{name}", *options, status=2)
