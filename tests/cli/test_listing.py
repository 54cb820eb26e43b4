"""`rlsdk plugins`: installed plugins from metadata alone, components with options, and causes of broken plugins."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from rlsdk.cli import root
from rlsdk.kinds import KINDS

LAB = """
    import attrs, rlsdk
    from rlsdk.components import Use
    print("imported")  # as a library's banner

    @rlsdk.reward("exact")
    def exact(rollout, *, scale: float = 1.0, mode: str, names: tuple[str, ...] = ("a",)) -> float:
        '''Full marks
        or nothing [really].

        More.

        Args:
            scale: Factor [0, 1].
        '''

    @rlsdk.algorithm("calm")
    @attrs.frozen(kw_only=True)
    class Calm(rlsdk.Algorithm):
        '''Calmer.'''

        policy_loss: Use = Use("ppo", {"clip_low": 0.1})
        must: int
"""


def run(*arguments, status=0):
    ran = CliRunner().invoke(root, ["plugins", *arguments])
    assert ran.exit_code == status, ran.stderr
    return ran.stdout if status == 0 else ran.stderr


@pytest.fixture
def lab(site):
    site.install("rlsdk-lab", {"lab.py": LAB}, plugins={"lab": "lab"}, version="1.2")
    site.install("rlsdk-sad", {"sad.py": "import not_there"}, plugins={"sad": "sad"})
    site.install("one", plugins={"both": "lab"})
    site.install("two", plugins={"both": "lab"})
    site.install("impostor", plugins={"core": "lab"})
    return site


def rows(text):
    return {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line.strip()}


def test_the_listing_is_made_from_metadata_alone(lab):
    text = run()
    assert "lab" not in sys.modules
    assert "sad" not in sys.modules
    assert rows(text)["lab"] == "lab rlsdk-lab 1.2"
    assert rows(text)["sad"] == "sad rlsdk-sad 1.0"  # that it is broken shows when it is imported
    assert text.index("core ") < text.index("both ")  # ours comes first
    assert "both one 1.0 broken: claimed by one 1.0 and two 1.0; uninstall one" in " ".join(text.split())
    assert "both two 1.0 broken: claimed by one 1.0 and two 1.0; uninstall one" in " ".join(text.split())
    assert "core impostor 1.0 broken: the name 'core' belongs to rlsdk" in " ".join(text.split())


def test_the_listing_as_json(lab):
    found = {(e["plugin"], e["distribution"]): e for e in json.loads(run("--json"))}
    assert found["lab", "rlsdk-lab"] == {
        "plugin": "lab",
        "distribution": "rlsdk-lab",
        "version": "1.2",
        "module": "lab",
        "broken": None,
    }
    assert found["both", "one"]["broken"] == "claimed by one 1.0 and two 1.0; uninstall one"
    assert found["core", "impostor"]["broken"]


def test_a_plugin_shows_its_components_with_options(lab):
    text = " ".join(run("lab").split())
    assert "lab/exact Full marks or nothing [really]." in text
    assert "scale float = 1.0 Factor [0, 1]." in text
    assert "mode str, required" in text
    assert "names list of str = [a]" in text
    assert "lab/calm Calmer." in text
    assert "policy_loss ppo(clip_low=0.1) Per-token loss." in text
    assert "must required" in text


def test_a_kind_shows_every_plugin_and_what_is_broken(lab):
    text = run("reward")
    assert "countdown" in rows(text)
    assert "lab/exact" in rows(text)
    assert "sad (rlsdk-sad 1.0) broken: ModuleNotFoundError: No module named 'not_there'" in " ".join(text.split())
    assert "both (one 1.0) broken: claimed by" in " ".join(text.split())


def test_the_cause_does_not_name_the_plugin_twice(site):
    hook = "import rlsdk\n@rlsdk.hookimpl\ndef rlsdk_run_start(run): ..."
    site.install("rlsdk-hooked", {"hooked.py": hook}, plugins={"hooked": "hooked"})
    text = " ".join(CliRunner().invoke(root, ["plugins", "hooked"]).stdout.split())
    assert text.startswith("hooked (rlsdk-hooked 1.0) broken: the hook rlsdk_run_start has no argument 'run'")


@pytest.mark.parametrize("group", ["rlsdk.plugins", "rlsdk", "RLSDK.v2", "rlsdk.v2", "rlsdk.v10"])
@pytest.mark.parametrize("command", ["plugins", "check", "explain"])
def test_an_entry_point_in_another_group_is_reported(site, command, group, tmp_path):
    site.install("rlsdk-lost", {"lost.py": ""}, plugins={"lost": "lost"}, group=group)
    config = tmp_path / "lost.yaml"
    config.write_text("reward: lost/x")
    ran = CliRunner().invoke(root, [command, str(config) if command == "explain" else "lost"])
    said = " ".join(ran.stderr.split())
    assert f"rlsdk-lost 1.0 declares 'lost' in the group {group!r}, which rlsdk does not read; " in said
    assert ran.exit_code != 0


def test_a_plugin_for_another_api_is_not_to_be_renamed(site):
    site.install("rlsdk-lost", {"lost.py": ""}, plugins={"lost": "lost"}, group="rlsdk.v2")
    said = " ".join(CliRunner().invoke(root, ["plugins", "lost"]).stderr.split())
    assert "reads 'rlsdk.v1', the plugin API for which it must be written" in said
    assert "install another version of rlsdk or of rlsdk-lost" in said


def test_components_as_json(lab):
    found = json.loads(run("reward", "--json"))
    (exact,) = (c for c in found["components"] if c["name"] == "lab/exact")
    assert (exact["kind"], exact["plugin"], exact["summary"]) == ("reward", "lab", "Full marks or nothing [really].")
    scale, mode, names = exact["options"]
    assert scale == {"name": "scale", "type": "float", "required": False, "default": 1.0, "help": "Factor [0, 1]."}
    assert (mode["required"], mode["default"], names["default"]) == (True, None, ["a"])
    causes = {entry["plugin"]: entry["broken"] for entry in found["broken"]}
    assert causes["sad"].startswith("ModuleNotFoundError: No module named 'not_there' (")
    assert set(causes) == {"sad", "both", "core"}


def test_algorithms_show_their_parts():
    found = {c["name"]: c["parts"] for c in json.loads(run("algorithm", "--json"))["components"]}
    assert found["grpo"]["advantage"] == "grpo(std_normalize=true)"
    assert found["grpo"]["kl_coef"] == "0.04"
    assert found["ppo"]["shaping"] == "[kl_penalty(coef=0.001)]"
    assert "advantage gae(gamma=1.0, lam=1.0)" in " ".join(run("algorithm").split())


def test_algorithms_show_what_differs_from_the_usual_one():
    lines = run("algorithm").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("gpg "))
    end = next(i for i, line in enumerate(lines[start + 1 :], start + 1) if line and not line.startswith(" "))
    rows = [line.split() for line in lines[start + 1 : end] if line.startswith("  ") and line[2] != " "]
    shown = {name: value for name, value, *_ in rows}
    assert "(otherwise as grpo)" in " ".join(lines[start : start + 3])
    assert shown["kl_coef"] == "0.0"
    assert "passing" not in shown
    assert len(run("algorithm", "--all").splitlines()) > 2 * len(lines)


def test_lines_have_the_given_width_and_no_trailing_blanks(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("reward").splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_listed_and_every_component_is_documented(kind):
    found = json.loads(run(kind, "--json"))
    assert found["broken"] == []
    for component in found["components"]:
        assert component["summary"], component["name"]
        undocumented = [o["name"] for o in component["options"] if not o["help"]]
        assert not undocumented, f"{kind} {component['name']}: {undocumented}"


def test_core_lists_all_that_rlsdk_brings_along():
    found = json.loads(run("core", "--json"))
    kinds = {c["kind"] for c in found["components"]}
    assert {"reward", "advantage", "policy_loss", "algorithm", "workflow", "tasks", "engine", "learner"} <= kinds


def test_a_broken_plugin_is_listed_by_its_name_and_fails_the_command(lab):
    ran = CliRunner().invoke(root, ["plugins", "sad"])
    text = " ".join(ran.stdout.split())
    assert text.startswith("sad (rlsdk-sad 1.0) broken: ModuleNotFoundError: No module named 'not_there' (")
    assert [ran.exit_code, run("both", status=1), run("core of impostor", status=1)] == [1, "", ""]
    ran = CliRunner().invoke(root, ["plugins", "sad", "--json"])
    assert (ran.exit_code, len(json.loads(ran.stdout)["broken"])) == (1, 1)


def test_a_wrong_name_is_answered_with_the_nearest(lab):
    text = run("rewrd", status=2)
    assert "no plugin 'rewrd'; did you mean 'reward'? Kinds: reward, " in text
    assert "Plugins: core, " in text
    assert "did you mean 'policy_loss'?" in run("loss", status=2) and "'environment'?" in run("env", status=2)
    assert "Install its package (pip install …), or load a file: --plugin FILE.py" in text


def test_a_component_given_for_a_plugin_is_answered_with_its_kinds(lab):
    text = run("grpo", status=2)
    assert "'grpo' is a component of core" in text
    assert "`rlsdk plugins advantage` or `rlsdk plugins algorithm`" in text


def test_a_file_given_for_a_plugin_is_answered_with_the_option(lab):
    assert "`rlsdk plugins mine --plugin mine.py`" in run("mine.py", status=2)


def test_a_file_is_listed_too(tmp_path):
    (tmp_path / "mine.py").write_text("import rlsdk\n@rlsdk.kl('k')\ndef k(p, q):\n    'Mine.'\n")
    assert "mine/k Mine." in " ".join(run("mine", "--plugin", str(tmp_path / "mine.py")).split())
    assert str(tmp_path / "mine.py") in run("--plugin", str(tmp_path / "mine.py")).replace("\n", "")


def test_hooks_of_a_plugin_are_listed(tmp_path):
    path = tmp_path / "watcher.py"
    path.write_text("import rlsdk\n@rlsdk.hookimpl\ndef rlsdk_step_end(step): ...\n")
    assert run("watcher", "--plugin", str(path)) == "no components\nhooks: rlsdk_step_end\n"
    assert json.loads(run("watcher", "--plugin", str(path), "--json"))["hooks"] == ["rlsdk_step_end"]
