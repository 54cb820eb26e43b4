"""Sweeps and tournaments: checks before the start, processes, files, and results."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from rlsdk.cli import root
from rlsdk.config import check
from rlsdk.errors import ConfigError, RunError
from rlsdk.opening.resuming import prepare_folder
from rlsdk.sweeps import running, tournament
from rlsdk.sweeps.running import (
    Interrupted,
    RunOutcome,
    as_json,
    default_metric,
    failures_of,
    require_metric,
    rows_of,
    train_all,
)
from rlsdk.sweeps.runs import SweepRun, sweep_of

MODEL = Path(__file__).parents[2] / "examples" / "models" / "countdown-nano"
CONFIG = {
    "name": "trial",
    "model": {"path": str(MODEL), "max_length": 32},
    "tasks": {"train": {"use": "countdown", "size": 20, "numbers": 3, "template": "compact", "operators": "+-"}},
    "max_prompt_tokens": 16,
    "reward": "countdown",
    "algorithm": {"use": "grpo", "kl_coef": 0.0},
    "sampling": {"max_tokens": 14},
    "steps": 1,
    "batch_size": 8,
    "group_size": 8,
    "engine": "transformers",
    "placement": {"engine_threads": 1, "learner_threads": 1},
}


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "trial.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    return file


def rlsdk(*arguments: str) -> Any:
    return CliRunner().invoke(root, [*arguments], env={"COLUMNS": "100"})


def test_runs_are_compared_by_held_out_accuracy_only_if_all_evaluate_what_they_train() -> None:
    held_out = {**CONFIG["tasks"], "eval": {**CONFIG["tasks"]["train"], "split": "test"}}
    of = [check({**CONFIG, "tasks": held_out, "eval": section}) for section in ({}, {"every": 5, "after": False})]
    before = check({**CONFIG, "tasks": held_out, "eval": {"after": False}})
    assert default_metric(of) == "eval/sampled"
    assert [default_metric([of[0], other]) for other in (before, check(CONFIG))] == ["reward/mean"] * 2


def test_runs_of_a_sweep(config: Path) -> None:
    folder, runs, plans = sweep_of(config, ["learner.lr=1e-4,1e-3", "steps=2"], [], seeds=2)
    assert folder == Path("runs/trial-sweep")
    assert [run.name for run in runs] == [f"lr={lr}_seed={seed}" for lr in ("1e-4", "1e-3") for seed in (0, 1)]
    plan = plans["lr=1e-3_seed=1"]
    assert (plan.config.steps, plan.config.seed, plan.learner.options["lr"]) == (2, 1, 1e-3)
    assert plan.folder == folder / "lr=1e-3_seed=1"


def test_settings_of_a_sweep_and_of_a_tournament_are_applied_in_the_order_given(config: Path) -> None:
    _, _, plans = sweep_of(config, ["algorithm=ppo,grpo", "algorithm.entropy_coef=0.25"], [], seeds=1)
    assert [plan.algorithm.entropy_coef for plan in plans.values()] == [0.25, 0.25]
    found = tournament.tournament_of(
        ["ppo"], {"a": config}, Path("t"), settings=["algorithm.entropy_coef=0.25"], seeds=1
    )
    assert [plan.algorithm.entropy_coef for plan in found[1].values()] == [0.25]


def test_seeds_given_as_values_are_seeds(config: Path) -> None:
    _, runs, _ = sweep_of(config, ["seed=5,7"], [], seeds=1)
    assert [(run.seed, dict(run.group)) for run in runs] == [(5, {}), (7, {})]
    with pytest.raises(ConfigError, match="either several values or --seeds"):
        sweep_of(config, ["seed=5,7"], [], seeds=2)


def test_a_seed_is_not_given_twice(config: Path) -> None:
    with pytest.raises(ConfigError, match="seed: '1,01' has a duplicate value"):
        sweep_of(config, ["seed=1,01"], [], seeds=1)


@pytest.mark.parametrize(
    ("values", "equal"),
    [
        ("eval.before=true,True,false", "eval.before=true and eval.before=True"),
        ("algorithm.use=ppo,grpo,core/grpo", "algorithm.use=grpo and algorithm.use=core/grpo"),
        ("reward=countdown,{use: countdown}", "reward=countdown and reward={use: countdown}"),
    ],
)
def test_values_that_are_written_differently_but_equal_are_refused(config: Path, values: str, equal: str) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(equal)} give the same configuration; leave one out"):
        sweep_of(config, [values], [], seeds=2)


def test_nothing_starts_if_any_combination_is_wrong(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_started", lambda run: pytest.fail("a run was started"))
    ran = rlsdk("sweep", str(config), "learner.lrr=1,2", "algorithm=grpo,rlo", "--seeds", "2")
    assert ran.exit_code == 2
    assert "learner.lrr: unknown option 'lrr', did you mean 'lr'?" in ran.stderr
    assert "did you mean 'rloo'? (with learner.lrr=1, algorithm=rlo; learner.lrr=2, algorithm=rlo)" in ran.stderr
    assert ran.stderr.count("unknown option 'lrr'") == 1


def test_more_runs_than_anyone_means_are_refused_before_any_is_checked(config: Path) -> None:
    axes = ["learner.lr=log:1e-6:1e-3:50", "algorithm=grpo,rloo", "steps=3"]
    words = r"50 \(learner.lr\) × 2 \(algorithm\) × 11 \(--seeds\) = 1,100 runs; at most 1,000"
    with pytest.raises(ConfigError, match=words):
        sweep_of(config, axes, [], seeds=11)
    with pytest.raises(ConfigError, match=r"2 \(algorithms\) × 501 \(--seeds\) = 1,002 runs"):
        tournament.tournament_of(["grpo", "rloo"], {"countdown": config}, config.parent, seeds=501)


def test_a_folder_in_the_cloud_is_refused(config: Path) -> None:
    ran = rlsdk("sweep", str(config), "learner.lr=1e-4,1e-3", "out=s3://bucket/runs")
    assert ran.exit_code == 2 and "a sweep needs a local folder" in ran.stderr


def finish(run: SweepRun, value: float, status: str = "finished") -> None:
    """Write the files of a trained run."""
    plan = run.check()
    from rlsdk.checkpoints.checkpoint import Checkpoints

    prepare_folder(plan, Checkpoints(plan.folder, 1), resume=False, overwrite=False, allow_changes=False)
    lines = [{"step": 1, "reward/mean": 0.0}, {"step": 2, "reward/mean": value, "eval/sampled": value}]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run.path / "summary.json").write_text(json.dumps({"status": status}))


def test_finished_runs_are_kept_and_others_go_on(config: Path) -> None:
    _, runs, plans = sweep_of(config, ["learner.lr=1e-4,1e-3"], [], seeds=2)
    finish(runs[0], 0.5)
    finish(runs[1], 0.5, status="interrupted")
    assert [run.finished(plans[run.name]) for run in runs] == [True, False, False, False]
    assert [run.begun for run in runs] == [True, True, False, False]
    _, longer, plans = sweep_of(config, ["learner.lr=1e-4,1e-3", "steps=3"], [], seeds=2)
    assert not longer[0].finished(plans[longer[0].name])
    _, same, plans = sweep_of(config, ["learner.lr=1e-4,1e-3", "log_level=debug"], [], seeds=2)
    assert same[0].finished(plans[same[0].name])


def test_rows_are_means_over_seeds_best_first_and_failures_are_named(config: Path) -> None:
    folder, runs, _ = sweep_of(config, ["learner.lr=1e-4,1e-3,1e-2"], [], seeds=2)
    for run, value in zip(runs, [0.1, 0.3, 0.6, 0.6], strict=False):
        finish(run, value)
    runs[4].log.parent.mkdir(parents=True)
    runs[4].log.write_text("INFO something\nrlsdk: learner rank 0 failed in start:\n  no memory\n")
    outcomes = [*(RunOutcome(run, 0) for run in runs[:4]), *(RunOutcome(run, 1) for run in runs[4:])]
    rows = rows_of(outcomes, "eval/sampled")
    assert [(row.group["learner.lr"], row.estimate and round(row.estimate.value, 6)) for row in rows] == [
        ("1e-3", 0.6),
        ("1e-4", 0.2),
        ("1e-2", None),
    ]
    assert rows_of(outcomes, "eval/sampled", minimize=True)[0].group["learner.lr"] == "1e-4"
    assert "killed by SIGKILL; last line of its log: no memory" in failures_of([RunOutcome(runs[4], -9)])[0].reason
    first, second = failures_of(outcomes)
    assert first.reason == "learner rank 0 failed in start: no memory" and second.reason == "it left no log"
    found = as_json(folder, "eval/sampled", rows, [first, second])
    assert found["rows"][0]["values"] == {"0": 0.6, "1": 0.6} and found["rows"][0]["low"] == pytest.approx(0.6)
    assert (found["rows"][1]["low"], found["rows"][1]["high"]) == (0.0, 1.0)  # an accuracy
    assert runs[0].result("reward/mean") == 0.1
    with pytest.raises(
        RunError,
        match=r"no run has 'eval/greed', did you mean 'eval/sampled'\?; available: eval/sampled, reward/mean, step",
    ):
        require_metric(outcomes, "eval/greed")


def test_a_metric_logged_only_before_the_first_step_counts_and_one_never_finite_is_named(config: Path) -> None:
    _, runs, _ = sweep_of(config, ["learner.lr=1e-4"], [], seeds=1)
    finish(runs[0], math.nan)
    with (runs[0].path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 0, "probe": 3.0}\n')
    assert runs[0].result("probe") == 3.0
    outcomes = [RunOutcome(runs[0], 0)]
    with pytest.raises(RunError, match="--metric: 'eval/sampled' is not finite at the end of any run"):
        require_metric(outcomes, "eval/sampled")


def processes(monkeypatch: pytest.MonkeyPatch, program: str) -> list[str]:
    """Have each run be a small program instead of a training; names of those that were started."""
    started: list[str] = []

    def begin(run: SweepRun) -> subprocess.Popen[bytes]:
        started.append(run.name)
        return subprocess.Popen([sys.executable, "-c", program, run.name, str(run.seed)], start_new_session=True)

    monkeypatch.setattr(running, "_started", begin)
    return started


def test_runs_are_started_in_order_and_their_status_is_theirs(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, runs, plans = sweep_of(config, [], [], seeds=4)
    finish(runs[0], 0.5)
    signalled = "import os, sys; n = int(sys.argv[2]) - 1; sys.exit(n) if n < 2 else os.kill(os.getpid(), 2)"
    started = processes(monkeypatch, signalled)
    told: list[str] = []
    outcomes = train_all(runs, plans, lambda event, outcome: told.append(f"{outcome.run.seed} {event}"), parallel=2)
    assert started == ["seed=1", "seed=2", "seed=3"]
    assert [(each.status, each.kept) for each in outcomes] == [(0, True), (0, False), (1, False), (-2, False)]
    assert told[0] == "0 kept" and {"1 finished", "2 failed", "3 interrupted"} < set(told)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_is_passed_on_and_nothing_more_is_started(
    number: signal.Signals, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, runs, plans = sweep_of(config, [], [], seeds=3)
    waits = "import os, signal, sys, time; signal.signal(2, lambda *_: sys.exit(130)); "
    waits += f"os.kill(os.getppid(), {int(number)}); time.sleep(600)"
    started = processes(monkeypatch, waits)
    told: list[str] = []
    with pytest.raises(Interrupted):
        train_all(runs, plans, lambda event, _: told.append(event))
    assert started == ["seed=0"] and told == ["begins", "interrupted"]


HOLD = "import sys; from pathlib import Path; from rlsdk.runlog.folder import held\n"
HOLD += "with held(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


@pytest.mark.parametrize("finishes", [True, False])
def test_a_run_that_a_killed_sweep_left_in_training_is_waited_for(
    finishes: bool, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, runs, plans = sweep_of(config, [], [], seeds=2)
    finish(runs[0], 0.5, status="interrupted")
    left = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(runs[0].path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert left.stdout is not None and left.stdout.readline() == "held\n"
    started, told = processes(monkeypatch, "pass"), list[str]()

    def tell(event: str, outcome: RunOutcome) -> None:
        told.append(f"{outcome.run.seed} {event}")
        if event == "waits":
            assert outcome.process == str(left.pid) and started == []
            (runs[0].path / "summary.json").write_text(json.dumps({"status": "finished" if finishes else "failed"}))
            threading.Timer(0.5, left.communicate, [""]).start()

    outcomes = train_all(runs, plans, tell)
    mine = ["0 kept"] if finishes else ["0 continues", "0 finished"]
    assert told == ["0 waits", *mine, "1 begins", "1 finished"]
    assert [each.kept for each in outcomes] == [finishes, False]


def test_a_run_whose_folder_another_process_locks_first_has_not_failed(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, runs, plans = sweep_of(config, [], [], seeds=1)
    processes(monkeypatch, "import sys; sys.exit(2)")
    holders, told = iter(["", "7", "7", ""]), list[str]()
    monkeypatch.setattr(running, "process_in", lambda folder: next(holders, ""))
    (outcome,) = train_all(runs, plans, lambda event, outcome: told.append(event))
    assert told == ["begins", "waits", "begins", "failed"] and outcome.status == 2


def test_a_metric_without_a_final_number_is_not_a_result(config: Path) -> None:
    folder, runs, _ = sweep_of(config, ["learner.lr=1e-4,1e-3,1e-2"], [], seeds=1)
    for run, value in zip(runs, [0.1, float("nan"), 0.6], strict=True):
        finish(run, value)
    outcomes = [RunOutcome(run, 0) for run in runs]
    for metric in ("eval/sampled", "reward/mean"):
        rows = rows_of(outcomes, metric)
        assert [row.group["learner.lr"] for row in rows] == ["1e-2", "1e-4", "1e-3"]
        assert as_json(folder, metric, rows, [])["rows"][-1]["mean"] is None


def test_an_evaluation_without_a_scored_answer_is_not_replaced_by_an_earlier_one(config: Path) -> None:
    _, runs, _ = sweep_of(config, ["learner.lr=1e-4"], [], seeds=1)
    finish(runs[0], 0.4)
    with (runs[0].path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 9, "eval/sampled": null, "reward/mean": null}\n')
    assert runs[0].result("eval/sampled") is None
    assert runs[0].result("reward/mean") is None  # it may have been NaN


@pytest.mark.parametrize("command", [["sweep", "trial.yaml", "--metric", "eval/greedy"], ["tournament", "grpo"]])
def test_a_metric_of_evaluations_is_refused_before_the_first_run_if_there_are_none(
    config: Path, command: list[str]
) -> None:
    suite = ["--suite", "."] if command[0] == "tournament" else []
    refused = rlsdk(*command, *suite)
    assert refused.exit_code == 2
    assert "is measured by evaluations, and" in refused.output and "--metric reward/mean" in refused.output
    assert not Path("runs").exists()


def test_a_metric_that_may_be_misspelt_is_named_after_the_first_run(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, runs, _ = sweep_of(config, [], [], seeds=3)
    finish(runs[0], 0.5)
    processes(monkeypatch, "")
    said = rlsdk("sweep", "trial.yaml", "--seeds", "3", "--metric", "reward/maen").stderr.splitlines()
    assert said[1:3] == [
        "[1/3] seed=0: kept",
        "rlsdk: warning: --metric: this run does not have 'reward/maen', did you mean 'reward/mean'?; if no other "
        "will, stop with Ctrl-C, and repeat the command",
    ]
    assert "".join(said).count("warning") == 1
    for run in runs[1:]:
        finish(run, 0.5)
    assert "warning" not in rlsdk("sweep", "trial.yaml", "--seeds", "3", "--metric", "reward/mean").stderr


def test_a_tournament_whose_metric_no_run_has_fails(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = tournament.tournament_of(["grpo"], {"trial": config}, Path("t"), seeds=1)[0]
    finish(suite[0], 0.5)
    processes(monkeypatch, "")
    ended = rlsdk("tournament", "grpo", "--suite", ".", "--seeds", "1", "--out", "t", "--metric", "reward/maen")
    assert ended.exit_code == 1
    assert "--metric: no run has 'reward/maen', did you mean 'reward/mean'?; available: " in ended.output


def test_a_tournament_takes_names_mappings_and_settings() -> None:
    assert tournament.parted(["grpo", "{use: grpo, kl_coef: 0.1}", "steps=3", "learner.lr=1"]) == (
        ["grpo", "{use: grpo, kl_coef: 0.1}"],
        ["steps=3", "learner.lr=1"],
    )
    for entries, words in ((["steps=3"], "give at least one"), (["grpo", "grpo"], "grpo is given twice")):
        with pytest.raises(ConfigError, match=words):
            tournament.parted(entries)


def test_a_tournament_is_algorithms_by_tasks_by_seeds_and_ranked(config: Path) -> None:
    tasks = {"one": config, "two": config}
    runs, _ = tournament.tournament_of(["grpo", "rloo", "ppo"], tasks, Path("t"), settings=["steps=2"], seeds=2)
    assert len(runs) == 12 and [run.seed for run in runs] == [0] * 6 + [1] * 6
    values = {"grpo": -0.2, "rloo": 0.8, "ppo": 0.9}
    for run in runs:
        if run.group != {"algorithm": "ppo", "task": "two"}:
            finish(run, values[run.group["algorithm"]] + 0.02 * run.seed)
    outcomes = [RunOutcome(run, 0 if run.begun else 1) for run in runs]
    found = tournament.standings(outcomes, "eval/sampled")
    assert [each.algorithm for each in found] == ["rloo", "grpo", "ppo"]
    assert found[0].whole is not None and found[0].whole.value == pytest.approx(0.81)
    assert found[2].whole is None and len(found[2].missing) == 2
    plain = tournament.as_json("x", "eval/sampled", 2, found, failures_of(outcomes))
    assert plain["algorithms"][0]["tasks"]["two"]["values"] == {"0": 0.8, "1": pytest.approx(0.82)}
    assert plain["algorithms"][2]["tasks"]["one"]["high"] == 1.0  # an accuracy
    assert plain["algorithms"][2]["interquartile_mean"] is None and len(plain["failed"]) == 2


def test_algorithms_of_a_tournament_that_are_written_differently_but_equal_are_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match="algorithm=ppo, task=one and algorithm=core/ppo, task=one give the same"):
        tournament.tournament_of(["ppo", "core/ppo"], {"one": config}, Path("t"), seeds=2)


def test_the_suite_of_the_repository_is_found_and_fits_every_algorithm_it_is_for() -> None:
    tasks = tournament.suite_tasks("nano")
    assert [*tasks] == ["calculator", "countdown", "dialogue"]
    runs, _ = tournament.tournament_of(["grpo", "ppo", "decoupled_ppo", "remax"], tasks, Path("t"), seeds=1)
    assert len(runs) == 12


def test_what_imitates_demonstrations_is_evaluated_by_the_workflow_of_each_task() -> None:
    runs, plans = tournament.tournament_of(["sft", "mix"], tournament.suite_tasks("nano"), Path("t"), seeds=1)
    found = {tuple(run.group.values()): plans[run.name] for run in runs}
    names = {key: (plan.workflow.name, plan.eval_workflow.name) for key, plan in found.items()}
    assert names["sft", "dialogue"] == ("core/demonstration", "core/dialogue")
    assert names["sft", "countdown"] == ("core/demonstration", "core/single_turn")
    assert names["mix", "dialogue"] == ("core/dialogue", "core/dialogue")
    assert found["sft", "dialogue"].eval_workflow.options == {"turns": 2, "feedback": ":"}


def test_settings_of_the_workflow_reach_the_evaluation_of_what_imitates_demonstrations() -> None:
    tasks = {"dialogue": tournament.suite_tasks("nano")["dialogue"]}
    settings = ("workflow.turns=3",)
    runs, plans = tournament.tournament_of(["sft"], tasks, Path("t"), settings=settings, seeds=1)
    assert plans[runs[0].name].eval_workflow.options["turns"] == 3


def test_without_the_repository_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown suite 'nan'; available: nano"):
        tournament.suite_tasks("nan")
    monkeypatch.setattr(tournament, "rlsdk", type("Installed", (), {"__file__": str(tmp_path / "a" / "b" / "c.py")}))
    with pytest.raises(ConfigError, match="part of the repository, not of the installed package; clone it"):
        tournament.suite_tasks("nano")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no configuration"):
        tournament.suite_tasks("empty")


@pytest.mark.stack
@pytest.mark.slow
def test_a_sweep_trains_reports_fails_and_continues(config: Path) -> None:
    ran = rlsdk("sweep", str(config), "learner.lr=1e-4,1e-3", "--json")
    assert ran.exit_code == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert len(found["rows"]) == 2 and found["metric"] == "reward/mean" and not found["failed"]
    again = rlsdk("sweep", str(config), "learner.lr=1e-4,1e-3", "max_invalid=0.1")
    assert again.exit_code == 1
    assert "2 of 2 runs failed" in again.stderr and "max_invalid: was 0.2, is 0.1" in again.stderr
    kept = rlsdk("sweep", str(config), "learner.lr=1e-4,1e-3")
    assert kept.stderr.count("kept") == 2 and "mean" in kept.stdout
