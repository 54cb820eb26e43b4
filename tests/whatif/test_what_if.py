"""What-ifs on hand-made groups with known numbers, and on two steps of a real run.

`recorded/` holds the first two steps of a run of the quickstart's small model (`engine: transformers`), as it stored
them, with its configuration.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

from rlsdk.cli import root
from rlsdk.runlog.actors import mark_ended
from rlsdk.runlog.store import Address, RolloutStore
from rlsdk.runlog.tables import Entry
from rlsdk.types import Group, Message, Rollout, Score, Task
from rlsdk.whatif.comparison import Moments, scored_again
from rlsdk.whatif.question import Asked, question

MODEL = Path(__file__).parents[2] / "examples" / "models" / "countdown-nano"
CONFIG: dict[str, Any] = {
    "name": "made",
    "model": {"path": str(MODEL), "max_length": 32},
    "tasks": {"train": {"use": "countdown", "split": "train", "size": 8, "template": "compact"}},
    "reward": {"use": "countdown", "format_score": 0.0},
    "algorithm": {"use": "grpo", "kl_coef": 0.0},
    "sampling": {"max_tokens": 10},
    "steps": 2,
    "batch_size": 2,
    "group_size": 2,
}
LAB = """
import rlsdk

@rlsdk.reward("negated")
def negated(rollout):
    return -1.0 if rollout.text == "<answer>1+2</answer>" else 0.0
"""
RIGHT, WRONG = "<answer>1+2</answer>", "<answer>1-2</answer>"


def rollout(task: Task, text: str, tokens: int) -> Rollout:
    messages = (Message("user", str(task.prompt)), Message("assistant", text))
    return Rollout(
        task,
        messages,
        np.arange(tokens + 1) + 3,
        [False, *[True] * tokens],
        [0.0, *[-0.5] * tokens],
        [-1, *[0] * tokens],
    )


def group(number: int, *answers: tuple[str, int]) -> Group:
    task = Task(f"t{number}", "1,2>3:", {"target": 3, "numbers": [1, 2]}, source="countdown")
    rollouts = [rollout(task, text, tokens) for text, tokens in answers]
    scores = [Score(float(text == RIGHT), metrics={"reward/countdown": float(text == RIGHT)}) for text, _ in answers]
    return Group(task, rollouts, scores, uid=f"u{number}")


def make_run(folder: Path, groups: Sequence[Group] = (), **changes: Any) -> Path:
    """One step of two groups: rewards 1 and 0 on 2 and 3 tokens; two rewards of 0, which teach nothing."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **changes}))
    groups = groups or [group(0, (RIGHT, 2), (WRONG, 3)), group(1, (WRONG, 4), (WRONG, 4))]
    store = RolloutStore(Address.make(folder, None, None))
    entries = [
        Entry(number=i, source="countdown", state="trained", step=1, uses=1, group=each)
        for i, each in enumerate(groups)
    ]
    with store.transaction():
        store.put(entries)
    store.close()
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "made")


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    file = tmp_path / "lab.py"
    file.write_text(LAB)
    return file


def invoke(run: Path, *arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(root, ["what-if", str(run), *arguments])


def answer(run: Path, *arguments: str) -> dict[str, Any]:
    result = invoke(run, *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_run_whose_model_is_gone_is_answered_unless_gradients_are_asked_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made", model={"path": "gone", "max_length": 32})
    assert answer(run, "--algorithm", "dr_grpo")["trained"]["after"] == 2
    refused = invoke(run, "--checkpoint", str(MODEL))
    assert (refused.exit_code, "model.path: there is no folder" in refused.output) == (2, True)


def test_without_a_change_nothing_differs(run: Path) -> None:
    found = answer(run)
    assert found["groups"] == 2
    assert found["trained"] == {"before": 2, "after": 2, "gained": 0, "lost": 0}
    assert found["teaching"] == {"before": 1, "after": 1}
    assert found["tokens"] == 13
    assert found["sign_changes"] == found["became_zero"] == found["became_nonzero"] == 0
    assert found["advantages"]["correlation"] == pytest.approx(1)
    assert found["cosine"] is None
    assert found["changes"] == {}
    assert not found["scored_again"]


def test_tokens_that_were_too_old_to_be_trained_on_are_left_out(tmp_path: Path) -> None:
    whole = group(0, (RIGHT, 3), (WRONG, 3))
    young = [attrs.evolve(r, loss_mask=[False, False, True, True]) for r in whole.rollouts]
    found = answer(make_run(tmp_path / "late", [attrs.evolve(whole, rollouts=young)]))
    assert found["tokens"] == 4 and found["advantages"]["correlation"] == pytest.approx(1)


def test_a_negated_reward_turns_every_sign(run: Path, lab: Path) -> None:
    found = answer(run, "--reward", "lab/negated", "--plugin", str(lab))
    assert found["sign_changes"] == 5  # 2 tokens of the right answer, 3 of the wrong one
    assert found["advantages"]["correlation"] == pytest.approx(-1)
    assert found["rewards"]["before"] == 0.25
    assert found["rewards"]["after"] == -0.25
    assert found["rewards"]["mean_change"] == 0.5  # of four rollouts, one goes from 1 to -1
    (example,) = found["examples"]
    assert (example["before"], example["after"], example["rollout"]) == (1.0, -1.0, 0)
    assert example["response"] == RIGHT


def test_a_filter_drops_the_group_of_equal_rewards_and_says_why(run: Path) -> None:
    found = answer(run, "--filter", "nonzero_variance")
    assert found["trained"] == {"before": 2, "after": 1, "gained": 0, "lost": 1}
    (changed,) = found["changed_groups"]
    assert changed["task"] == "t1"
    assert changed["before"] == "trained, but every advantage is 0: every reward is 0 (2 rollouts)"
    assert changed["after"] == "filtered: filter 'nonzero_variance': every reward is 0 (2 rollouts)"


def test_another_algorithm_changes_advantages_by_the_formula(run: Path) -> None:
    found = answer(run, "--algorithm", "dr_grpo")
    grpo = 0.5 / (np.sqrt(0.5) + 1e-6)  # rewards 1 and 0: mean 1/2, unbiased deviation 1/√2
    assert found["advantages"]["mean_change"] == pytest.approx(5 * (grpo - 0.5) / 13, rel=1e-5)
    assert found["sign_changes"] == 0
    assert found["changes"]["algorithm.use"] == {"before": "grpo", "after": "dr_grpo"}


def test_several_rewards_and_settings_are_written_as_in_a_configuration(run: Path) -> None:
    found = answer(run, "--reward", "{use: countdown, format_score: 0.5}", "--reward", "{use: countdown, weight: 2}")
    assert found["rewards"]["after"] == pytest.approx((3 + 3 * (0.5 + 2 * 0.1)) / 4)  # 0.1: the default format_score
    assert answer(run, "reward.format_score=0.4")["rewards"]["after"] == pytest.approx((1 + 3 * 0.4) / 4)


def test_all_faults_are_reported_together(run: Path) -> None:
    result = invoke(run, "--reward", "countdwn", "--filter", "nonzero", "group_size=4", "sampling.temperature=2")
    assert result.exit_code != 0
    faults = result.output
    for part in (
        "countdwn",
        "nonzero",
        "group_size: a what-if uses the stored rollouts",
        "sampling.temperature: ",
    ):
        assert part in faults


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--algorithm", "rloo"], "algorithm.shaping[0]: 'kl_penalty' reads ref_logprobs, which a run does not store"),
        (["--algorithm", "rloo"], "or give algorithm.shaping=[]"),
        (["--algorithm", "remax"], "reads baseline_rewards, the rewards of greedy answers"),
        (["--algorithm", "{use: ppo, shaping: []}"], "reads values, the values of a critic"),
        (["--algorithm", "sft"], "algorithm: it learns from demonstrations"),
        (["algorithm.top_entropy_quantile=0.2"], "the run stored no entropies, which the algorithm reads"),
        (["--reward", "{use: reward_model, path: my-org/my-classifier}"], "holds a model in a Ray actor"),
        (["--reward", "{use: ["], "--reward: '{use: [' is not YAML"),
        (["--steps", "a"], "--steps: 'a' given; expected a step or a range"),
        (["--steps", "7-"], "has stored no groups of steps 7- yet"),
        (["--steps", "5-3"], "--steps: '5-3' given, which ends before it begins"),
        (["--checkpoint", "3"], "has no complete checkpoint of step 3"),
    ],
)
def test_batches_that_cannot_be_replayed_are_reported(run: Path, arguments: list[str], expected: str) -> None:
    result = invoke(run, *arguments)
    assert result.exit_code != 0
    assert expected in result.output


def test_a_run_that_ended_without_rollouts_does_not_promise_any(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made")
    (run / "rollouts.db").unlink()
    RolloutStore(Address.make(run, None, None)).close()
    mark_ended(run, "failed")
    refused = invoke(run, "--algorithm", "dr_grpo")
    assert (refused.exit_code, "and ended after 0." in refused.output, "yet" in refused.output) == (2, True, False)


def test_the_remedy_for_a_shaping_that_reads_the_reference_works(run: Path) -> None:
    assert answer(run, "--algorithm", "rloo", "algorithm.shaping=[]")["groups"] == 2


def test_a_run_that_stores_one_step_in_ten_says_so(tmp_path: Path) -> None:
    refused = invoke(make_run(tmp_path / "made", save_rollouts=10), "--steps", "5")
    assert "has stored no groups of steps 5 yet; with save_rollouts=10 it stores one step in 10" in refused.output


def test_a_setting_of_the_only_reward_applies_to_the_one_that_is_named(run: Path) -> None:
    found = answer(run, "--reward", "countdown", "reward.format_score=0.5")
    assert found["rewards"]["after"] == pytest.approx((1 + 3 * 0.5) / 4)


def test_a_correlation_is_at_most_one() -> None:
    values = np.arange(1000) / 1000
    assert Moments.of(1e6 + values, values).as_json()["correlation"] == pytest.approx(1.0, abs=1e-3)
    assert abs(Moments.of(1e6 + values, values).as_json()["correlation"]) <= 1


def test_a_list_of_groups_that_is_cut_off_says_so(tmp_path: Path) -> None:
    made = make_run(tmp_path / "made", [group(i, (WRONG, 1), (WRONG, 1)) for i in range(51)])
    found = answer(made, "--filter", "nonzero_variance")
    assert (found["trained"]["lost"], len(found["changed_groups"])) == (51, 50)
    assert "50 of 51 groups with a different outcome are listed" in found["notes"]


def test_code_that_the_folder_names_is_not_executed_unless_the_user_gives_it(tmp_path: Path) -> None:
    file = tmp_path / "evil.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{LAB.replace('negated', 'worse')}")
    run = make_run(tmp_path / "made", reward="evil/worse", plugins=[str(file)])
    refused = invoke(run)
    assert "names code that would be executed" in refused.output
    assert not (tmp_path / "ran").exists()
    assert answer(run, "--plugin", str(file), "--reward", "evil/worse")["sign_changes"] == 5


def test_a_plugin_that_the_user_gives_may_also_be_named_by_its_functions(tmp_path: Path) -> None:
    file = tmp_path / "handy.py"
    file.write_text(
        f"{LAB}\n\ndef double(number: int) -> int:\n    'Return twice the number.'\n    return 2 * number\n"
    )
    tools = {"use": "tools", "tools": [f"{file}:double"], "parser": "hermes"}
    run = make_run(tmp_path / "made", workflow=tools, plugins=[str(file)])
    assert "workflow.tools[0]" in invoke(run, "--filter", "none").output
    assert answer(run, "--plugin", str(file), "--filter", "none")


def test_a_missing_folder_or_store_is_reported(tmp_path: Path) -> None:
    assert "not the folder of a run" in invoke(tmp_path).output
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    assert "has no stored rollouts" in invoke(tmp_path).output


def test_gradients_of_a_negated_reward_are_opposite(run: Path, lab: Path) -> None:
    same = answer(run, "--checkpoint", str(MODEL))
    assert same["cosine"] == pytest.approx(1)
    other = answer(run, "--checkpoint", str(MODEL), "--reward", "lab/negated", "--plugin", str(lab))
    assert other["cosine"] == pytest.approx(-1)
    norms = other["gradient_norms"]
    assert norms["before"] == pytest.approx(norms["after"], rel=1e-5)
    assert norms["before"] > 0


def test_gradients_with_a_reference_model_that_followed_the_policy_are_refused(tmp_path: Path) -> None:
    algorithm = {"use": "grpo", "kl": "k3", "kl_coef": 0.1}
    run = make_run(tmp_path / "made", algorithm=algorithm, reference={"update_every": 5})
    assert invoke(run, "--filter", "none").exit_code == 0
    refused = invoke(run, "--checkpoint", str(MODEL))
    assert refused.exit_code != 0
    assert "--checkpoint: the run's own objective reads a reference model that followed the policy" in refused.output


def test_gradients_of_an_entropy_bonus_with_a_target_are_refused(run: Path) -> None:
    """Its weight would be that before the first step: none."""
    target = "algorithm.entropy_coef={target: 0.2}"
    assert invoke(run, target).exit_code == 0
    refused = invoke(run, "--checkpoint", str(MODEL), target)
    assert refused.exit_code != 0
    assert "--checkpoint: the other objective has an entropy bonus whose weight depends on all" in refused.output


def test_a_real_run_is_reproduced_and_its_table_is_shown(tmp_path: Path) -> None:
    run = tmp_path / "recorded"
    shutil.copytree(Path(__file__).parent / "recorded", run)
    again = answer(run, "--reward", "{use: countdown, format_score: 0.1}")
    assert again["notes"] == []  # stored advantages are those that the configuration gives
    assert again["rewards"]["mean_change"] == pytest.approx(0, abs=1e-9)
    assert again["trained"] == {"before": 11, "after": 11, "gained": 0, "lost": 0}
    shown = invoke(run, "--filter", "none", "--steps", "2")
    assert shown.exit_code == 0
    assert "groups with a different outcome" in shown.output
    assert "filtered: filter 'nonzero_variance': every reward is 0.1" in shown.output


async def test_a_trajectory_scored_at_its_end_has_one_score_and_failed_rollouts_keep_theirs() -> None:
    class Counting:
        async def score_group(self, rollouts: Any) -> list[Score]:
            return [Score(float(r.step + 1), token_rewards=((1, 1.0),)) for r in rollouts]

    task = Task("t", "p", 1)
    parts: dict[str, Any] = {"trajectory": "a", "messages": (), "token_ids": [1, 2], "loss_mask": [0, 1]}
    parts |= {"logprobs": [0, -1], "policy_versions": [-1, 0]}
    steps = [Rollout(task, **parts, step=i) for i in range(2)]
    failed = Rollout(task, **{**parts, "trajectory": ""}, status="failed")
    made = Group(task, [*steps, failed], [Score(0), Score(0), Score.invalid("workflow failed")])
    (end,) = await scored_again(Counting(), [made], at_end=True)  # type: ignore[arg-type]
    assert [s.value for s in end.scores[:2]] == [2.0, 2.0]
    assert end.scores[0].token_rewards is None
    assert end.scores[1].token_rewards == ((1, 1.0),)
    assert end.scores[2].reason == "workflow failed"
    (each,) = await scored_again(Counting(), [made], at_end=False)  # type: ignore[arg-type]
    assert [s.value for s in each.scores[:2]] == [1.0, 2.0]


def test_a_question_holds_both_plans(run: Path) -> None:
    found = question(run, Asked(algorithm="{use: dapo, entropy_coef: 1e-3}", plugins=()))
    assert found.after.algorithm.entropy_coef == 0.001
    assert found.before.algorithm.aggregate == "seq-mean-token-mean"
    assert found.after.algorithm.aggregate == "token-mean"
    assert not found.scores_again
