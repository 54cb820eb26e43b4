"""The instructions for coding agents in AGENTS.md and the skills are valid and work."""

from __future__ import annotations

import re
import runpy
import textwrap
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from rlsdk.cli import COMMANDS, root

ROOT = Path(__file__).resolve().parents[2]
SKILLS = sorted((ROOT / "skills").glob("*/SKILL.md"))
PAGES = [ROOT / "AGENTS.md", *SKILLS]


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.parent.name)
def test_a_skill_says_what_it_is_for(skill: Path) -> None:
    _, head, text = skill.read_text(encoding="utf-8").split("---\n", 2)
    about = yaml.safe_load(head)
    assert about["name"] == skill.parent.name
    assert about["description"].endswith(".")
    assert "You are done when" in text


def test_the_agents_page_names_every_skill_and_only_files_that_exist() -> None:
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert set(re.findall(r"skills/([\w-]+)/SKILL\.md", text)) == {skill.parent.name for skill in SKILLS}
    for path in re.findall(r"`((?:docs|skills|tests)/[\w/.-]+|CONTRIBUTING\.md)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_its_commands_and_options_exist(page: Path) -> None:
    commands = re.findall(r"\brlsdk ((?:[a-z]+)\b[^`\n]*)", page.read_text(encoding="utf-8"))
    named = [line for line in commands if line.split()[0] in COMMANDS]
    assert named
    for line in named:
        helped = CliRunner().invoke(root, [line.split()[0], "--help"])
        for option in re.findall(r" (--[a-z-]+)", line.partition("#")[0]):
            nested = CliRunner().invoke(root, [*line.split()[:2], "--help"])
            assert option in helped.output + nested.output, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_short_run_whose_rollouts_are_read_saves_them(page: Path) -> None:
    """The quickstart saves those of every tenth step."""
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        if "rlsdk rollouts" in block and (steps := re.search(r" steps=(\d+)", block)):
            assert int(steps[1]) >= 10 or "save_rollouts=1" in block


@pytest.mark.parametrize("kind", ["reward", "policy_loss"])
def test_the_file_to_begin_with_passes_its_check(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(root, ["new", kind, "mine.py"]).exit_code == 0
    checked = CliRunner().invoke(root, ["check", "mine.py"])
    assert checked.exit_code == 0, checked.output


def test_the_numbers_worked_out_by_hand_are_right(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "skills/add-an-algorithm/SKILL.md").read_text(), re.DOTALL)
    (tmp_path / "by_hand.py").write_text(textwrap.dedent(code))
    runpy.run_path(str(tmp_path / "by_hand.py"))
