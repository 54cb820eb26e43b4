"""The examples pass the check; so do those that train what another one made."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.config import check

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.relative_to(ROOT / "examples").as_posix())
def test_the_example_passes_the_check(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text("{}")
    made_by_another = ["model.path=" + str(tmp_path)] if path.parent.name == "warm_start" else []
    plan = check(path, made_by_another)
    assert plan.config.tasks.eval is not None


def test_there_are_examples():
    assert {"quickstart.yaml", "countdown_nano.yaml", "countdown_qwen2.5_0.5b.yaml"} <= {p.name for p in EXAMPLES}
