"""A folder with a model, data and rewards for checking migrated configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, x=None):
    return 0.0

def reward_func(queries, prompts, labels):
    return [0.0]

def add(a: int, b: int) -> int:
    '''Add two numbers.'''
    return a + b
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "my_reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    return tmp_path
