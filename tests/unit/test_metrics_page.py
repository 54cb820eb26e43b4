"""docs/metrics.md lists every metric that rlsdk logs, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlsdk.contracts.metric_names import METRICS, pattern_of, unknown_metric

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
DOCUMENTED = [
    key
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for key in re.findall(r"`([^`]+)`", line.split(" | ")[0])
]
FAMILIES = sorted({key.split("/")[0] for key in DOCUMENTED})
NOT_METRICS = {"text/plain"}


def undocumented(keys: set[str]) -> list[str]:
    """Those of some keys that no row of the page describes; NAME is any name, N a number, … any rest."""
    patterns = [pattern_of(key) for key in DOCUMENTED]
    return sorted(key for key in keys if not any(pattern.fullmatch(key) for pattern in patterns))


def logged() -> set[str]:
    """Keys of metrics that stand in the code as they are."""
    files = [path for room in ("engines", "learners", "trainer") for path in (ROOT / "rlsdk" / room).rglob("*.py")]
    texts = [path.read_text() for path in [*files, ROOT / "rlsdk" / "evaluation" / "evaluation.py"]]
    literal = re.compile(rf'"((?:{"|".join(FAMILIES)})/[a-z_]+)"')
    return {key for text in texts for key in literal.findall(text)} - NOT_METRICS


def test_the_page_and_the_list_of_names_that_checks_use_are_equal() -> None:
    assert list(METRICS) == DOCUMENTED


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("reward/mean", None),
        ("reward/brevity", None),  # a term
        ("source/algebra/share", None),
        ("eval/pass@16", None),
        ("actor/dual_clip_share", None),
        ("reward/mena", "reward/mean"),  # could be a term, but hardly is
        ("actor/grad_nrom", "actor/grad_norm"),
        ("rollout/length", "rollouts/length"),
        ("reward_mean", "reward/mean"),
        ("eval/pass@k", ""),
        ("lab/speed", ""),
    ],
)
def test_a_name_that_no_metric_has_gets_the_nearest(name: str, near: str | None) -> None:
    assert unknown_metric(name) == near


def test_every_key_in_the_code_is_on_the_page() -> None:
    assert len(logged()) > 30
    assert undocumented(logged()) == []


def test_a_key_that_is_not_on_the_page_is_noticed() -> None:
    keys = {"actor/loss", "eval/pass@8", "source/algebra/reward/mean", "staleness/share_12", "time/step"}
    assert undocumented(keys) == []
    assert undocumented({"engines/happy", "eval/pass@k", "staleness/share_x", "times/step"}) == [
        "engines/happy",
        "eval/pass@k",
        "staleness/share_x",
        "times/step",
    ]


def test_every_key_on_the_page_is_in_the_code() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "rlsdk").rglob("*.py"))
    ends = ("NAME", "…")
    last = {key: key.rstrip("N").split("/")[-1].removesuffix("_reward") for key in DOCUMENTED if not key.endswith(ends)}
    last = {key: name.replace("NAME", "") for key, name in last.items()}
    assert [key for key, name in last.items() if name not in code] == []
