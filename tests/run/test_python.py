"""Training from Python: the script and the notebook of docs/howto/python.md, and their runs on the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
SMALL = ("batch_size=4", "group_size=4", "tasks.eval=null", "old_logprobs=rollout")

NOTEBOOK = """
import ast, asyncio, json, sys

# What IPython does with a notebook: its cells are run in `__main__`, may await, and are kept in the list `In`.
In = [""]

async def run_cells():
    for cell in json.loads(open(sys.argv[1]).read())["cells"]:
        if cell["cell_type"] == "code":
            In.append("".join(cell["source"]))
            code = compile(In[-1], f"cell-{len(In)}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            running = eval(code, globals())
            if running is not None:
                await running

del __file__  # a notebook is no file
asyncio.run(run_cells())
"""


def run(folder: Path, *command: str, status: int = 0) -> str:
    ran = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == status, ran.stderr[-4000:] + ran.stdout[-2000:]
    return ran.stdout


def rlsdk(folder: Path, *arguments: str) -> str:
    return run(folder, "-m", "rlsdk.cli", *arguments)


def test_the_run_of_a_script_is_explained_evaluated_and_resumed_by_its_folder_alone(tmp_path: Path) -> None:
    script = shutil.copy(ROOT / "examples" / "train_in_python.py", tmp_path / "train_in_python.py")
    (tmp_path / "models").symlink_to(ROOT / "examples" / "models")
    run(tmp_path, str(script), "steps=1", *SMALL)
    folder = tmp_path / "runs" / "in-python"
    (line,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert line["reward/best"] == line["reward/mean"]
    Path(script).unlink()

    config = "runs/in-python/config.yaml"
    assert "train_in_python/brief" in rlsdk(tmp_path, "explain", config)
    found = json.loads(rlsdk(tmp_path, "eval", config, *EVALUATED, "--json", "--checkpoint", "runs/in-python"))
    assert found["tasks"] == {"countdown": 4}
    summary = json.loads(rlsdk(tmp_path, "train", config, "steps=2", "--resume", "--json"))
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    assert [p.name for p in (folder / "code").iterdir()] == ["train_in_python.py"]


EVALUATED = ("tasks.eval={use: countdown, split: test, size: 4, numbers: 3, operators: '+-', template: compact}",)


def test_the_notebook_runs_and_keeps_the_source_of_its_reward(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "kernel.py").write_text(NOTEBOOK)
    said = run(tmp_path, "kernel.py", str(ROOT / "examples" / "notebooks" / "train.ipynb"))
    assert "LIMIT = 24" in said and "def brief" in said and "Trainer" not in said
    summary = json.loads((tmp_path / "runs" / "notebook" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 6)
    assert "notebook/brief" in rlsdk(tmp_path, "explain", "runs/notebook/config.yaml")
