"""Reports and comparisons of hand-made run folders."""

from __future__ import annotations

import json
import logging
import math
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from rlsdk.cli import root
from rlsdk.contracts import History
from rlsdk.errors import ConfigError
from rlsdk.reporting import report as reporting
from rlsdk.reporting.compare import SeedGroup, comparison, comparison_page
from rlsdk.reporting.report import FinishedRun, read_run, report_page, try_report, write_report
from rlsdk.runlog.alerts import Alert, append_alerts
from rlsdk.runlog.store import DATABASE, Address, RolloutStore
from rlsdk.runlog.tables import Entry
from rlsdk.types import Group, Rollout, Score, Task

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e\ud800"


def make_run(folder: Path, name: str, *, seed: int = 0, lr: float = 1e-3, end: float = 0.5) -> Path:
    path = folder / name
    path.mkdir()
    config = {"name": name, "seed": seed, "learner": {"use": "deepspeed", "lr": lr}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [{"step": s, "reward/mean": end * s / 20, "time/step": 2.0} for s in range(1, 21)]
    lines[-1] |= {"eval/sampled": end, "eval/easy/sampled": end / 2, "eval/hard/sampled": 1 - end}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_a_report_is_one_page_without_scripts_and_what_a_model_wrote_is_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine")
    summary = {"status": "failed", "error": HOSTILE, "warnings": [HOSTILE], "seconds": {"start": 1.0, "whole": 4.0}}
    (run / "summary.json").write_text(json.dumps(summary))
    alert = {"step": 3, "name": "clip_share", "level": "warning", "message": HOSTILE, "advice": "lower it"}
    (run / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
    store = RolloutStore(Address.make(run, None, None))
    task = Task(id="t", prompt=HOSTILE)
    rollout = Rollout.from_text(task, HOSTILE)
    with store.transaction():
        store.put(
            [Entry(number=1, source="s", state="trained", step=1, uses=1, group=Group(task, [rollout], [Score(1)]))]
        )
    store.close()
    path = write_report(run)
    text = path.read_text()
    tags = Tags(text)
    assert not {"script", "img", "link", "iframe", "a"} & tags.found
    assert not {name for name in tags.attributes if name.startswith("on")} | {"src", "href"} & tags.attributes
    assert "http" not in text.replace("http-equiv", "")
    assert text.count("&lt;script&gt;") >= 5  # error, warning, finding, prompt and response
    assert not {"\x1b", "\u202e"} & set(text)  # nothing turns the direction of the text
    assert "25%" in text  # of the time
    assert "learner:" in text
    assert "<polyline" in text
    assert path.name == "report.html"


def test_a_finding_that_returns_is_one_line_of_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine")
    alerts = [Alert(step, "clip_share", "warning", f"{step}% clipped", "lower it") for step in (3, 9, 12)]
    append_alerts(run, [*alerts, Alert(5, "cut_off", "warning", "cut", "raise it")])
    text = unescape(report_page(read_run(run)))
    assert "3 times from step 3 to 12, clip_share: 12% clipped; lower it" in text
    assert "step 5, cut_off: cut; raise it" in text
    assert text.count("clip_share") == 1


def test_a_long_curve_of_a_report_is_thinned_out_to_means(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine")
    lines = [json.dumps({"step": s, "reward/mean": float(s % 2)}) + "\n" for s in range(1, 10_002)]
    (run / "metrics.jsonl").write_text("".join(lines))
    text = report_page(read_run(run))
    points = text.split('<polyline class="c0" points="')[1].split('"')[0].split()
    assert 500 < len(points) <= 640
    assert len({point.split(",")[1] for point in points}) <= 3  # means of 16 values, and of one at the end
    assert ">1</text>" in text and "step 10001" in text


def test_the_samples_of_a_report_are_of_several_tasks(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine")
    store = RolloutStore(Address.make(run, None, None))
    with store.transaction():
        for n in range(12):
            task = Task(id=f"t{n}", prompt=f"Question {n}")
            rollouts = [Rollout.from_text(task, f"Answer {i}") for i in range(8)]
            group = Group(task, rollouts, [Score(1)] * 8)
            store.put([Entry(number=n + 1, source="s", state="trained", step=1 + n // 6, uses=1, group=group)])
    store.close()
    text = report_page(read_run(run))
    assert [n for n in range(12) if f"<td>Question {n}</td>" in text] == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]


def test_the_commands_of_a_report_quote_a_folder_with_spaces(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "my run")
    shown = unescape(report_page(read_run(folder)))
    assert f"rlsdk train '{folder}/config.yaml' 'name=my run-again'\nrlsdk compare '{folder}' …" in shown


def test_the_command_of_a_report_names_the_plugin_files_that_the_configuration_does_not(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "lab")
    config = folder / "config.yaml"
    files = {"a": "my a.py", "b": "b.py", "c": "code/c.py"}
    head = "".join(f"# plugin {name}: file {file}, source 12ab\n" for name, file in files.items())
    config.write_text(f"{head}{config.read_text()}plugins: [b.py, code/c.py]\n")
    assert f"rlsdk train {config} name=lab-again --plugin 'my a.py'\n" in unescape(report_page(read_run(folder)))


def test_runs_are_compared_by_the_files_that_their_paths_mean(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "model").mkdir(parents=True)
    runs = []
    for name, written, start in (("one", "model", "a"), ("two", "x/../../a/model", "b"), ("other", "model", "b")):
        config = make_run(tmp_path, name) / "config.yaml"
        head = f"# relative paths begin at {json.dumps(str(tmp_path / start))}\n"
        config.write_text(f"{head}name: {name}\nmodel: {{path: {written}}}\n")
        runs.append(read_run(config.parent))
    assert comparison(runs[:2])["differences"] == {} and len(comparison(runs[:2])["groups"]) == 1
    found = comparison(runs)["differences"]["model.path"]
    assert found == {"one": str(tmp_path.resolve() / "a" / "model"), "other": "model"}


def test_a_run_that_trains_still_has_a_report(tmp_path: Path) -> None:
    assert "not finished" in report_page(read_run(make_run(tmp_path, "young")))


def test_a_report_that_cannot_be_written_is_a_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reporting, "report_page", full)
    with caplog.at_level(logging.WARNING):
        try_report(make_run(tmp_path, "mine"))
    assert "report.html was not written: OSError: [Errno 28] No space left on device" in caplog.text


def test_the_curve_of_seeds_is_their_mean_at_the_steps_that_all_have() -> None:
    def run_of(lines: list[tuple[int, float]]) -> FinishedRun:
        history = History.of([{"step": step, "reward/mean": value} for step, value in lines])
        return FinishedRun(Path("x"), "", {}, {}, history, ())

    group = SeedGroup("g", (run_of([(1, 0.0), (2, 1.0), (3, 5.0), (3, 3.0)]), run_of([(2, 3.0), (3, 4.0), (5, 9.0)])))
    mean, band = group.curve("reward/mean")
    assert (mean.steps.tolist(), mean.values.tolist()) == ([2, 3], [2.0, 3.5])
    assert band is not None and [each.values.tolist() for each in band] == [[1.0, 3.0], [3.0, 4.0]]
    assert len(SeedGroup("g", (run_of([(1, 0.0)]), run_of([(2, 0.0)]))).curve("reward/mean")[0]) == 0


def test_the_curves_are_drawn_as_pictures_next_to_the_report_or_elsewhere(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine")
    for option, folder in ((("--png",), run / "report"), (("--png", str(tmp_path / "a" / "b")), tmp_path / "a" / "b")):
        found = CliRunner().invoke(root, ["report", str(run), *option])
        assert found.exit_code == 0, found.output
        names = ["reward-and-held-out-accuracy.png", "seconds-per-step.png"]
        assert sorted(path.name for path in folder.iterdir()) == names  # charts without values are left out
        assert found.output.split() == [str(run / "report.html"), *(str(folder / name) for name in names)]
        assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_a_run_that_failed_before_its_first_step_has_a_report(tmp_path: Path) -> None:
    run = tmp_path / "early"
    run.mkdir()
    (run / ".rlsdk-run").touch()
    (run / "summary.json").write_text(json.dumps({"status": "failed", "error": "no such model"}))
    assert "no such model" in report_page(read_run(run))


def test_a_run_whose_rollouts_cannot_be_read_has_a_report_that_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine")
    (run / DATABASE).write_bytes(b"not a database" * 1000)
    text = write_report(run).read_text()
    assert "rollouts.db cannot be read: file is not a database" in text and "<polyline" in text


def test_another_folder_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not the folder of a run: it has no metrics\.jsonl"):
        read_run(tmp_path)
    found = CliRunner().invoke(root, ["report", str(tmp_path)])
    assert found.exit_code == 2


# --- comparisons


def three(folder: Path) -> list[Path]:
    return [
        make_run(folder, "a", seed=0, end=0.5),
        make_run(folder, "a2", seed=1, end=0.6),
        make_run(folder, "fast", seed=0, lr=1e-2, end=0.2),
    ]


def test_seeds_are_one_group_with_a_confidence_interval(tmp_path: Path) -> None:
    found = comparison([read_run(path) for path in three(tmp_path)])
    assert {label: len(folders) for label, folders in found["groups"].items()} == {"a": 2, "fast": 1}
    assert found["differences"] == {"learner.lr": {"a": 0.001, "fast": 0.01}}
    held_out = found["metrics"]["eval/sampled"]
    # Student's interval would be 0.55 ± 0.6353; an accuracy is between 0 and 1.
    assert held_out["a"] == {"mean": pytest.approx(0.55), "low": 0.0, "high": 1.0, "seeds": 2}
    assert held_out["fast"] == {"mean": 0.2, "low": None, "high": None, "seeds": 1}
    rewards = found["metrics"]["reward/mean"]  # of steps 11 to 20: 0.3875 and 0.465
    assert rewards["fast"]["mean"] == pytest.approx(0.155)
    # mean 0.42625, standard deviation 0.0548, standard error 0.03875, t of one degree of freedom 12.706
    low, high = pytest.approx(0.42625 - 0.49236, abs=1e-4), pytest.approx(0.42625 + 0.49236, abs=1e-4)
    assert rewards["a"] == {"mean": pytest.approx(0.42625), "low": low, "high": high, "seeds": 2}


def test_repetitions_of_a_seed_are_no_evidence_about_seeds(tmp_path: Path) -> None:
    runs = [read_run(path) for path in three(tmp_path)[:2]]
    twice = comparison([runs[0], runs[0]])["metrics"]["eval/sampled"]["a"]
    assert twice == {"mean": 0.5, "low": None, "high": None, "seeds": 1}
    again = read_run(make_run(tmp_path, "again", seed=0, end=0.3))
    found = comparison([*runs, again])["metrics"]["eval/sampled"]["a"]
    assert (found["mean"], found["seeds"]) == (pytest.approx(((0.5 + 0.3) / 2 + 0.6) / 2), 2)


def test_missing_values_are_counted_and_an_earlier_evaluation_does_not_replace_the_last(tmp_path: Path) -> None:
    paths = three(tmp_path)
    lines = [json.loads(line) for line in (paths[0] / "metrics.jsonl").read_text().splitlines()]
    lines[-1] |= {"reward/mean": math.nan, "eval/sampled": None}
    (paths[0] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = comparison([read_run(path) for path in paths])
    assert found["missing"] == {str(paths[0]): {"reward/mean": 1, "eval/sampled": 1}}
    assert found["metrics"]["eval/sampled"]["a"] == {"mean": 0.6, "low": None, "high": None, "seeds": 1}
    assert found["metrics"]["reward/mean"]["a"]["seeds"] == 2
    shown = CliRunner().invoke(root, ["compare", *map(str, paths)])
    assert f"{paths[0]} lacks values, which are left out: reward/mean: 1 value, eval/sampled: 1 value" in shown.output


def test_runs_that_have_not_finished_are_named(tmp_path: Path) -> None:
    done, failed, trains = three(tmp_path)
    (done / "summary.json").write_text('{"status": "finished"}')
    (failed / "summary.json").write_text('{"status": "failed"}')
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(root, ["compare", str(done), str(failed), str(trains)])
    assert f"{failed} has not finished (failed, step 20); its values are those so far" in shown.output
    assert f"{trains} has not finished (training or killed, step 20)" in shown.output
    assert f"{done} has not" not in shown.output
    assert "Runs that have not finished" in comparison_page([read_run(done), read_run(failed)])


def test_a_name_and_its_long_form_are_the_same_setting(tmp_path: Path) -> None:
    paths = three(tmp_path)
    forms = ("{use: grpo, kl_coef: 0.0}\nreward: countdown", "{kl_coef: 0.0}\nreward: [{use: countdown}]", "ppo")
    for path, form in zip(paths, forms, strict=True):
        file = path / "config.yaml"
        file.write_text(file.read_text() + f"algorithm: {form}\n")
    found = comparison([read_run(path) for path in paths])
    assert found["groups"].keys() == {"a", "fast"}
    assert found["differences"]["algorithm.use"] == {"a": "grpo", "fast": "ppo"}
    assert "algorithm" not in found["differences"] and "reward[0]" not in found["differences"]


@pytest.mark.parametrize(
    ("given", "path", "expected"),
    [
        ("sampling: {temperature: 0.7}", "sampling.temperature", (0.7, 1.0)),
        ("learner: {grad_clip: 0.5}", "learner.grad_clip", (0.5, 1.0)),
        ("learner: {betas: [0.8, 0.95]}", "learner.betas[0]", (0.8, 0.9)),
        ("engine: transformers", "engine.use", ("transformers", "vllm")),
        ("algorithm: {kl_coef: 0}", "algorithm.kl_coef", (0, 0.04)),
        ("algorithm: {policy_loss: {clip_low: 0.1}}", "algorithm.policy_loss.clip_low", (0.1, 0.2)),
        ("algorithm: {policy_loss: {use: gspo}}", "algorithm.policy_loss.use", ("gspo", "ppo")),
        ("reward: {use: countdown, weight: 2.0}", "reward[0].weight", (2.0, 1.0)),
        ("eval: {environments: {workers: 2}}", "eval.environments.workers", (2, None)),
        ("learner: {lr: {from: 1.0e-3, to: 0.0, over: 9}}", "learner.lr.from", (1e-3, None)),
        ("workflow: mine.py:play", "workflow.use", ("mine.py:play", None)),
    ],
)
def test_a_setting_that_only_one_run_gives_is_compared_with_the_default(
    tmp_path: Path, given: str, path: str, expected: tuple[Any, Any]
) -> None:
    runs = []
    for name, more in (("one", yaml.safe_load(given)), ("other", {})):
        config = {"reward": "countdown", **more}
        (make_run(tmp_path, name) / "config.yaml").write_text(yaml.safe_dump({"name": name, **config}))
        runs.append(read_run(tmp_path / name))
    found = comparison(runs)
    assert tuple(found["differences"][path].values()) == expected
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(root, ["compare", *(str(run.folder) for run in runs)])
    row = next(line for line in shown.output.splitlines() if path in line)
    assert str(expected[1]) in row if expected[1] is not None else "–" in row


def test_a_default_that_is_given_is_no_difference(tmp_path: Path) -> None:
    paths = [make_run(tmp_path, name, seed=seed) for seed, name in enumerate(("one", "two"))]
    file = paths[0] / "config.yaml"
    file.write_text(file.read_text() + "sampling: {temperature: 1.0}\nalgorithm: {policy_loss: {clip_low: 0.2}}\n")
    found = comparison([read_run(path) for path in paths])
    assert found["differences"] == {} and found["groups"].keys() == {"one"}


def test_the_winner_is_named_by_task_and_one_seed_is_never_clear(tmp_path: Path) -> None:
    winners = comparison([read_run(path) for path in three(tmp_path)])["winners"]
    assert {task: each["run"] for task, each in winners.items()} == {"all": "a", "easy": "a", "hard": "fast"}
    assert not any(each["clear"] for each in winners.values())


def test_a_source_called_all_is_not_taken_for_all_tasks(tmp_path: Path) -> None:
    paths = three(tmp_path)
    for path in paths:
        lines = path / "metrics.jsonl"
        lines.write_text(lines.read_text().replace("eval/hard/", "eval/all/"))
    winners = comparison([read_run(path) for path in paths])["winners"]
    assert {task: each["run"] for task, each in winners.items()} == {"all": "a", "easy": "a", "source all": "fast"}


def test_intervals_that_do_not_touch_are_clear(tmp_path: Path) -> None:
    good = [make_run(tmp_path, f"g{i}", seed=i, end=0.9 + i / 1000) for i in range(3)]
    bad = [make_run(tmp_path, f"b{i}", seed=i, lr=1.0, end=0.1 + i / 1000) for i in range(3)]
    found = comparison([read_run(path) for path in (*good, *bad)])
    assert found["winners"]["all"] == {"run": "g0", "mean": pytest.approx(0.901), "clear": True}


def test_the_command_prints_tables_json_and_a_page(tmp_path: Path) -> None:
    paths = [str(path) for path in three(tmp_path)]
    page = tmp_path / "page.html"
    shown = CliRunner().invoke(root, ["compare", *paths, "--html", str(page)])
    assert shown.exit_code == 0, shown.output
    assert "learner.lr" in shown.output
    assert "0.55" in shown.output
    assert "<polygon" in page.read_text()  # the band of the seeds
    assert not {"script", "link"} & Tags(comparison_page([read_run(Path(p)) for p in paths])).found
    found = CliRunner().invoke(root, ["compare", *paths, "--json"])
    assert set(json.loads(found.output)) == {"groups", "unfinished", "differences", "metrics", "missing", "winners"}
    assert CliRunner().invoke(root, ["compare", paths[0]]).exit_code == 2


def test_a_report_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, rlsdk.reporting.report, rlsdk.reporting.compare; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
