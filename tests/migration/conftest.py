"""A folder with a model, data and rewards for checking migrated configurations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlsdk.plugins import loading

HERE = Path(__file__).parent
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, x=None):
    return 0.0

def reward_func(queries, prompts, labels):
    return [0.0]

def add(a: int, b: int) -> int:
    '''Add two numbers.'''
    return a + b

class Env:
    def move(self, to: str) -> str:
        '''Move.'''
        return to
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "my_reward.py").write_text(REWARD)
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def installed(name: str, site: Path) -> Iterator[None]:
    """A plugin package of this repository as pip would have installed it."""
    info = site / f"rlsdk_{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rlsdk-{name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[rlsdk.v1]\n{name} = rlsdk_{name}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        loading._default.cache_clear()
        yield
    loading._default.cache_clear()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The plugin with the losses of other trainers."""
    with installed("zoo", tmp_path_factory.mktemp("site")):
        yield
