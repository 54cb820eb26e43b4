"""Hand-made batches of other trainers, with known numbers and planted differences.

The batch of all tests: two tasks with two rollouts each, rewards 1, 0, 1, 0, responses of 3, 4, 2 and 3 tokens. The
sample's standard deviation of a group is √½, so that rlsdk's advantages are ±0.5 / (√½ + 10⁻⁶) = ±0.707106.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rlsdk.cli import root
from rlsdk.config import Plan
from rlsdk.errors import ConfigError, DataError, RlsdkError
from rlsdk.replay.computed import replay_plan
from rlsdk.replay.dump import dump_of
from rlsdk.replay.files import NAMES, read_columns, recognise
from rlsdk.replay.stages import Replay

MODEL = Path(__file__).parents[2] / "examples" / "models" / "countdown-nano"
LENGTHS = (3, 4, 2, 3)
MASK = np.array([[i < length for i in range(4)] for length in LENGTHS])
REWARDS = np.array([1.0, 0.0, 1.0, 0.0])
ADVANTAGE = 0.5 / (0.5**0.5 + 1e-6)
SIGNS = np.array([1.0, -1.0, 1.0, -1.0])
OLD = np.where(MASK, -0.5, 0.0)
RATIOS = np.array([[1.1, 1.25, 0.9, 1], [1.1, 0.7, 1.0, 1.05], [1.0, 0.8, 1, 1], [0.95, 1.3, 1.0, 1]])
NEW = np.where(MASK, OLD + np.log(RATIOS), 0.0)
REF = np.where(MASK, NEW - np.array([[0.3], [0.1], [-0.2], [0.4]]), 0.0)


def per_token(values: np.ndarray) -> np.ndarray:
    return np.where(MASK, values[:, None], 0.0)


def losses(advantages: np.ndarray, low: float = 0.2, high: float = 0.2, dual: float = 3.0) -> np.ndarray:
    plane = np.where(MASK, advantages, 0.0)
    open_losses = np.maximum(-plane * RATIOS, -plane * np.clip(RATIOS, 1 - low, 1 + high))
    return np.where(MASK, np.where(plane < 0, np.minimum(open_losses, -plane * dual), open_losses), 0.0)


def seq_mean(values: np.ndarray) -> float:
    return float(np.mean([values[i, : LENGTHS[i]].mean() for i in range(4)]))


def verl(**changes: Any) -> dict[str, Any]:
    """A batch as veRL's DataProto holds it, with losses as rlsdk would compute them; a None removes a field."""
    scores = np.zeros((4, 4))
    scores[range(4), [length - 1 for length in LENGTHS]] = REWARDS
    advantages = per_token(SIGNS * ADVANTAGE)
    fields = {
        "prompts": np.array([[0, 5], [0, 5], [7, 8], [7, 8]]),
        "responses": np.where(MASK, 11 + np.arange(16).reshape(4, 4), 0),
        "attention_mask": np.concatenate([[[0, 1], [0, 1], [1, 1], [1, 1]], MASK], axis=1).astype(np.int64),
        "response_mask": MASK.astype(np.int64),
        "old_log_probs": OLD,
        "log_probs": NEW,
        "token_level_scores": scores,
        "token_level_rewards": scores,
        "advantages": advantages,
        "pg_losses": losses(advantages),
        "loss": seq_mean(losses(advantages)),
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not None}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return replay_plan(None, ["algorithm.kl_coef=0"], ())


def replayed(plan: Plan, columns: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    return Replay(dump_of(recognise(columns), **options), plan).result()


def stage(result: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next(each for each in result["stages"] if each["stage"] == name)


# --- the shapes of each trainer


def test_a_batch_of_verl_that_agrees_has_no_first_difference(plan: Plan) -> None:
    found = replayed(plan, verl())
    assert found["framework"] == "verl"
    assert (found["rollouts"], found["groups"], found["tokens"]) == (4, 2, 12)
    assert found["first_difference"] is None
    assert all(stage(found, name)["equal"] for name in ("rewards", "advantages", "token losses", "loss"))
    # rollout 0: charged ratios 1.1, 1.2 (clipped from 1.25), 0.9; rollout 1: 1.1, 0.8 (from 0.7), 1, 1.05; and so on
    means = (-(1.1 + 1.2 + 0.9) / 3, (1.1 + 0.8 + 1.0 + 1.05) / 4, -(1.0 + 0.8) / 2, (0.95 + 1.3 + 1.0) / 3)
    assert found["loss"]["ours"] == pytest.approx(ADVANTAGE * sum(means) / 4, rel=1e-5)
    assert found["loss"]["by_normalisation"]["token-mean"] == pytest.approx(losses(verl()["advantages"]).sum() / 12)
    # of a token that is not clipped: -A·r / (4 rollouts · tokens); 0 of the two that are
    lengths = np.repeat(LENGTHS, LENGTHS)
    slopes = np.where(MASK, -SIGNS[:, None] * ADVANTAGE * RATIOS, 0.0)[MASK] / (4 * lengths)
    slopes[[1, 4]] = 0
    assert found["gradient"]["norm"] == pytest.approx(np.linalg.norm(slopes), rel=1e-5)
    assert found["gradient"]["cosine"] == pytest.approx(1.0)


def test_a_torch_file_of_nested_tensors_is_read_as_verl_has_it(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "batch.pt"
    batch = {k: torch.tensor(v) for k, v in verl().items()}
    torch.save({"batch": batch, "non_tensor_batch": {"uid": ["a", "b", "a", "b"]}, "meta_info": {}}, file)
    found = replayed(plan, read_columns(file))
    # With these labels the groups are rollouts 0 and 2, and 1 and 3: equal rewards, and no advantage.
    assert found["first_difference"]["first"] == {
        "rollout": 0, "token": 0, "ours": 0.0, "theirs": pytest.approx(ADVANTAGE),
    }  # fmt: skip
    assert "groups of 2 consecutive rollouts" in found["first_difference"]["reason"]


def test_rollouts_of_verl_as_json_lines_have_rewards_and_no_tokens(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "7.jsonl"
    rows = [{"input": f"q{i // 2}", "output": "x", "gts": "1", "score": float(REWARDS[i]), "step": 7} for i in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = replayed(plan, read_columns(file))
    assert found["framework"] == "verl"
    assert found["groups"] == 2
    assert stage(found, "advantages")["ours"]["greatest"] == pytest.approx(ADVANTAGE, rel=1e-5)
    assert stage(found, "advantages")["equal"] is None
    assert any("no logprobs were recorded" in note for note in found["notes"])


def test_a_single_rollout_as_json_lines_is_one_row(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    said = {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}
    file.write_text(json.dumps({**said, "reward": 0.5}) + "\n")
    found = replayed(plan, read_columns(file))
    assert (found["framework"], found["rollouts"]) == ("trl", 1)
    assert stage(found, "rewards")["ours"]["mean"] == 0.5


def test_completions_of_trl_differ_by_their_eps(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "completions_00003.parquet"
    theirs = SIGNS * 0.5 / (0.5**0.5 + 1e-4)
    table = {
        "step": [3] * 4,
        "prompt": ["a", "a", "b", "b"],
        "completion": ["x"] * 4,
        "accuracy_reward": [1.0, 0.0, 0.5, 0.0],
        "format_reward": [0.0, 0.0, 0.5, None],
        "advantage": theirs.tolist(),
    }
    table["format_reward"][3] = 0.0
    pq.write_table(pa.table(table), file)
    found = replayed(plan, read_columns(file))
    assert found["framework"] == "trl"
    assert found["first_difference"]["stage"] == "advantages"
    assert found["first_difference"]["reason"].startswith("theirs adds 0.0001 to the standard deviation, rlsdk 1e-06")
    assert any("accuracy_reward, format_reward" in note for note in found["notes"])
    named = replayed(plan, read_columns(file), rewards=["accuracy_reward"])
    assert named["first_difference"]["stage"] == "advantages"  # 0.5 of the third rollout is missing


def test_tensors_of_trl_have_one_advantage_a_rollout(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "inputs.npz"
    np.savez(
        file,
        prompt_ids=np.array([[0, 5], [0, 5], [7, 8], [7, 8]]),
        prompt_mask=np.array([[0, 1], [0, 1], [1, 1], [1, 1]]),
        completion_ids=np.where(MASK, 3, 0),
        completion_mask=MASK.astype(np.int64),
        old_per_token_logps=OLD,
        per_token_logps=NEW,
        rewards=REWARDS,
        advantages=SIGNS * ADVANTAGE,
        loss=losses(per_token(SIGNS * ADVANTAGE)).sum() / 12,
    )
    found = replayed(plan, read_columns(file))
    assert found["framework"] == "trl"
    assert stage(found, "advantages")["equal"]
    assert found["first_difference"]["stage"] == "loss"
    assert found["first_difference"]["reason"].startswith("theirs is the mean over all tokens of the batch")


def test_inputs_of_trl_have_no_rewards_and_losses_start_from_their_advantages(plan: Plan) -> None:
    fields = {
        "prompt_ids": np.array([[0, 5], [0, 5], [7, 8], [7, 8]]),
        "prompt_mask": np.array([[0, 1], [0, 1], [1, 1], [1, 1]]),
        "completion_ids": np.where(MASK, 3, 0),
        "completion_mask": MASK.astype(np.int64),
        "num_items_in_batch": np.array(12),
        "old_per_token_logps": OLD,
        "per_token_logps": NEW,
        "advantages": 2 * SIGNS * ADVANTAGE,  # not what rlsdk would assign
        "loss": losses(per_token(2 * SIGNS * ADVANTAGE)).sum() / 12,
    }
    found = replayed(plan, fields)
    assert (found["framework"], found["loss"]["ours"]) == ("trl", found["loss"]["from_their_advantages"])
    assert stage(found, "advantages")["ours"] is None and "rewards" not in [s["stage"] for s in found["stages"]]
    assert found["first_difference"]["stage"] == "loss"
    assert found["first_difference"]["reason"].startswith("theirs is the mean over all tokens of the batch")
    assert any("no rewards were recorded" in note for note in found["notes"])


def slime_samples() -> list[list[dict[str, Any]]]:
    return [
        [
            {
                "group_index": task,
                "index": 2 * task + i,
                "prompt": f"q{task}",
                "tokens": [5, 6 + task, *range(LENGTHS[2 * task + i])],
                "response_length": LENGTHS[2 * task + i],
                "response": "x",
                "reward": float(REWARDS[2 * task + i]),
                "loss_mask": [1] * LENGTHS[2 * task + i],
                "rollout_log_probs": OLD[2 * task + i, : LENGTHS[2 * task + i]].tolist(),
                "status": "completed",
                "metadata": {},
            }
            for i in range(2)
        ]
        for task in range(2)
    ]


def test_samples_of_slime_are_read_group_by_group(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "rollout_3.pt"
    torch.save({"rollout_id": 3, "samples": slime_samples()}, file)
    found = replayed(plan, read_columns(file))
    assert found["framework"] == "slime"
    assert (found["rollouts"], found["groups"], found["tokens"]) == (4, 2, 12)
    assert found["fields"]["behaviour_logprobs"] == "rollout_log_probs"
    # at ratio 1 the loss is -mean(A), and both groups' advantages add up to 0
    assert found["loss"]["ours"] == pytest.approx(0, abs=1e-6)


def test_train_data_of_slime_has_rewards_that_are_normalised_already(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "train_3_0.pt"
    rows = [torch.full((length,), float(s * ADVANTAGE)) for length, s in zip(LENGTHS, SIGNS, strict=True)]
    data = {
        "tokens": [torch.tensor([5, 6 + i // 2, *range(length)]) for i, length in enumerate(LENGTHS)],
        "response_lengths": list(LENGTHS),
        "loss_masks": [torch.ones(length, dtype=torch.int) for length in LENGTHS],
        "raw_reward": REWARDS.tolist(),
        "rewards": (SIGNS * ADVANTAGE).tolist(),
        "log_probs": [torch.full((length,), -0.5) for length in LENGTHS],
        "advantages": rows,
    }
    torch.save({"rollout_id": 3, "rank": 0, "rollout_data": data}, file)
    found = replayed(plan, read_columns(file))
    assert found["framework"] == "slime"
    assert stage(found, "advantages")["equal"]
    assert found["first_difference"]["stage"] == "rewards"
    assert found["first_difference"]["reason"].startswith("theirs are already normalised: the reward minus the group's")


def test_sequences_of_openrlhf_are_shifted_by_one_token(plan: Plan, tmp_path: Path) -> None:
    sequences = np.array([[0, 5, 1, 2, 3, 0], [0, 5, 1, 2, 3, 4], [7, 8, 1, 2, 0, 0], [7, 8, 1, 2, 3, 0]])
    wide = {n: np.concatenate([np.zeros((4, 1)), v], axis=1) for n, v in {"mask": MASK, "old": OLD}.items()}
    advantages = np.concatenate([np.zeros((4, 1)), per_token(SIGNS * ADVANTAGE)], axis=1)
    file = tmp_path / "experience.safetensors"
    arrays = {
        "sequences": sequences,
        "attention_mask": (sequences > 0).astype(np.int64),
        "action_mask": wide["mask"].astype(np.int64),
        "action_log_probs": wide["old"],
        "rewards": REWARDS,
        "advantages": advantages,
    }
    save_file(arrays, file)
    dump = dump_of(recognise(read_columns(file)))
    assert dump.framework == "openrlhf"
    assert [p.tolist() for p in dump.prompts] == [[5], [5], [7, 8], [7, 8]]
    assert [dump.responses[i][dump.masks[i]].tolist() for i in range(3)] == [[1, 2, 3], [1, 2, 3, 4], [1, 2]]
    found = Replay(dump, plan).result()
    assert found["first_difference"] is None
    assert stage(found, "advantages")["equal"]


# --- planted differences

LOO = SIGNS  # the reward less that of the other rollout
WHITE = per_token(SIGNS * ADVANTAGE)[MASK]
WHITE = (WHITE - WHITE.mean()) / WHITE.std(ddof=1)


def whitened_plane() -> np.ndarray:
    plane = np.zeros((4, 4))
    plane[MASK] = WHITE
    return plane


@pytest.mark.parametrize(
    ("advantages", "reason"),
    [
        (per_token(SIGNS * 0.5 / (0.5 + 1e-6)), "population's (ddof 0) standard deviation"),
        (per_token(SIGNS * 0.5), "theirs divides by nothing, rlsdk by the group's standard deviation"),
        (per_token(LOO), "theirs subtracts the mean of the group's other rollouts"),
        (per_token(SIGNS * 0.5 / (0.5**0.5 + 1e-4)), "theirs adds 0.0001 to the standard deviation"),
        (per_token(SIGNS * 0.5 / (0.5**0.5 + 1e-3)), "theirs adds 0.001 to the standard deviation"),
        (per_token(SIGNS * 0.5 / ((1 / 3) ** 0.5 + 1e-6)), "by the batch's standard deviation"),
        (whitened_plane(), "whitened over the batch's tokens"),
        (per_token(-SIGNS * ADVANTAGE), "opposite sign"),
        (per_token(SIGNS * ADVANTAGE) * 3, "theirs is 3 times rlsdk's"),
    ],
)
def test_the_cause_of_different_advantages_is_reported(plan: Plan, advantages: np.ndarray, reason: str) -> None:
    found = replayed(plan, verl(advantages=advantages, pg_losses=None, loss=None))
    assert found["first_difference"]["stage"] == "advantages"
    assert reason in found["first_difference"]["reason"]
    assert found["first_difference"]["first"]["rollout"] == 0
    # Every later stage starts from the recorded advantages, so what was recorded of it agrees.
    assert replayed(plan, verl(advantages=advantages, pg_losses=losses(advantages), loss=None))["stages"][3]["equal"]


def test_a_missing_eps_is_reported_for_a_small_spread(plan: Plan) -> None:
    scores = np.zeros((4, 4))
    scores[range(4), [2, 3, 1, 2]] = REWARDS * 1e-4  # standard deviation 7·10⁻⁵: 10⁻⁶ is 1.4 %
    columns = verl(
        token_level_scores=scores, token_level_rewards=scores, advantages=per_token(SIGNS * 0.5**0.5),
        pg_losses=None, loss=None,
    )  # fmt: skip
    assert (
        "theirs adds no eps to the standard deviation, rlsdk 1e-06"
        in replayed(plan, columns)["first_difference"]["reason"]
    )


def test_kl_in_the_reward_is_reported_with_its_coefficient(plan: Plan) -> None:
    scores = verl()["token_level_scores"]
    found = replayed(plan, verl(token_level_rewards=scores - 0.01 * (OLD - REF), ref_log_prob=REF))
    assert found["first_difference"]["stage"] == "rewards"
    assert "KL in the reward: theirs is the score minus 0.01 × the KL" in found["first_difference"]["reason"]
    # rollout 0: Σ(old − ref) = Σ(0.3 − log r) = 0.9 − log(1.1 · 1.25 · 0.9)
    assert found["first_difference"]["first"]["theirs"] == pytest.approx(1 - 0.01 * (0.9 - np.log(1.1 * 1.25 * 0.9)))


@pytest.mark.parametrize("coefficient", [0.001, 0.04])
def test_kl_in_the_loss_is_reported_with_its_coefficient(plan: Plan, coefficient: float) -> None:
    k3 = np.where(MASK, np.exp(REF - NEW) - (REF - NEW) - 1, 0.0)
    base = losses(verl()["advantages"])
    by_token = replayed(plan, verl(ref_log_prob=REF, pg_losses=base + coefficient * k3, loss=None))
    assert by_token["first_difference"]["reason"].startswith(f"KL in the loss: theirs has {coefficient:g} × the KL")
    whole = seq_mean(base) + coefficient * seq_mean(k3)
    at_once = replayed(plan, verl(ref_log_prob=REF, pg_losses=None, loss=whole))
    assert at_once["first_difference"]["stage"] == "loss"
    assert f"with {coefficient:g} × the KL to the reference (k3) in the loss" in at_once["first_difference"]["reason"]


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        ((0.2, 0.22), "its upper clip bound at 1.22, rlsdk at 1.2"),
        ((0.25, 0.2), "its lower clip bound at 0.75, rlsdk at 0.8"),
        ((0.2, 10.0), "theirs does not clip where rlsdk's upper bound is 1.2 (ratios go to 1.25)"),
        ((0.2, 0.2, 1.25), "its dual clip bound at 1.25, rlsdk clips nothing there"),
    ],
)
def test_other_clip_bounds_are_read_from_the_losses(plan: Plan, bounds: tuple[float, ...], reason: str) -> None:
    found = replayed(plan, verl(pg_losses=losses(verl()["advantages"], *bounds), loss=None))
    assert found["first_difference"]["stage"] == "token losses"
    assert reason in found["first_difference"]["reason"]


def test_other_clip_bounds_are_found_from_the_loss_alone(plan: Plan) -> None:
    loss = seq_mean(losses(verl()["advantages"], 0.1, 0.2))
    found = replayed(plan, verl(pg_losses=None, loss=loss))
    assert "ratios clipped below 0.9 and above 1.2" in found["first_difference"]["reason"]


@pytest.mark.parametrize(
    ("total", "reason"),
    [
        (lambda x: x.sum() / 12, "the mean over all tokens of the batch"),
        (lambda x: x.sum() / 4, "the sum over tokens, divided by the number of rollouts"),
        (lambda x: x.sum() / 16, "as if padding counted"),
        (lambda x: x[:2].sum() / 14 + x[2:].sum() / 10, "the mean over groups of the mean over their tokens"),
        (lambda x: x[:, 1:].sum() / 8, "mask off by one: the first token of each response is missing"),
    ],
)
def test_another_normalisation_is_reported(plan: Plan, total: Callable[[np.ndarray], float], reason: str) -> None:
    found = replayed(plan, verl(loss=float(total(losses(verl()["advantages"])))))
    assert found["first_difference"]["stage"] == "loss"
    assert reason in found["first_difference"]["reason"]
    assert found["first_difference"]["reason"].endswith("rlsdk's is seq-mean-token-mean")


def test_a_loss_that_is_no_number_differs(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    formula = "(x.logprobs - x.logprobs.detach() - 1).sqrt()"
    file.write_text(f"import rlsdk\n\n@rlsdk.policy_loss('root')\ndef root(x):\n    return {formula}\n")
    broken = replay_plan({"use": "grpo", "policy_loss": "broken/root", "kl_coef": 0}, [], [str(file)])
    found = replayed(broken, verl())
    assert stage(found, "token losses")["equal"] is False
    assert found["first_difference"]["stage"] == "token losses"
    assert np.isnan(found["first_difference"]["first"]["ours"])
    assert found["first_difference"]["reason"].startswith("rlsdk's is nan")
    torch.save({"batch": {name: torch.tensor(value) for name, value in verl().items()}}, tmp_path / "batch.pt")
    words = ["replay", str(tmp_path / "batch.pt"), "--plugin", str(file), "--json", "algorithm.policy_loss=broken/root"]
    printed = CliRunner().invoke(root, [*words, "algorithm.kl_coef=0"])
    assert "NaN" not in printed.output
    assert json.loads(printed.output)["loss"]["ours"] is None


def test_an_off_by_one_mask_is_reported(plan: Plan) -> None:
    late = np.roll(per_token(SIGNS * ADVANTAGE), 1, axis=1)
    late[:, 0] = 0.0
    late[1, 3] = -ADVANTAGE
    found = replayed(plan, verl(advantages=late, pg_losses=None, loss=None))
    assert found["first_difference"]["reason"].startswith("mask off by one: theirs is nonzero one token late")
    assert found["first_difference"]["first"] == {
        "rollout": 0, "token": 0, "ours": pytest.approx(ADVANTAGE), "theirs": 0.0,
    }  # fmt: skip


def test_ratios_against_the_sampler_are_reported(plan: Plan) -> None:
    sampler = OLD - 0.1
    found = replayed(plan, verl(rollout_log_probs=sampler, ratio=np.exp(NEW - sampler)))
    assert found["first_difference"]["stage"] == "ratios"
    assert "relative to the sampler's logprobs" in found["first_difference"]["reason"]


def test_padding_beyond_the_longest_response_is_part_of_the_width(plan: Plan) -> None:
    wide = {n: np.pad(v, ((0, 0), (0, 4))) if np.ndim(v) == 2 and n != "prompts" else v for n, v in verl().items()}
    loss = losses(wide["advantages"][:, :4]).sum() / (4 * 8)
    found = replayed(plan, {**wide, "loss": loss})
    assert "as if padding counted" in stage(found, "loss")["reason"]
    # Dr. GRPO divides by the greatest length of a response, which the file tells: what is null is not a run's default.
    dump = dump_of(recognise({**wide, "loss": loss}))
    assert dump.width == 8
    other = ["algorithm.policy_loss.dual_clip=3"]
    same = Replay(dump, replay_plan("dr_grpo", other, (), width=dump.width)).result()
    slopes = np.where(MASK, SIGNS[:, None] * ADVANTAGE * RATIOS, 0.0)[MASK] / (4 * 8)
    slopes[[1, 4]] = 0  # clipped
    assert stage(same, "loss")["equal"]
    assert same["gradient"]["their_norm"] == pytest.approx(np.linalg.norm(slopes), rel=1e-5)


def test_an_entropy_bonus_is_omitted_with_a_note() -> None:
    with_bonus = replay_plan(None, ["algorithm.kl_coef=0", "algorithm.entropy_coef=0.1"], ())
    found = replayed(with_bonus, verl())
    assert found["first_difference"] is None
    assert "no entropies are recorded: the entropy bonus of the loss is left out" in found["notes"]


def test_a_gradient_with_another_normalisation_is_reported(plan: Plan) -> None:
    slope = np.where(MASK, -SIGNS[:, None] * ADVANTAGE * RATIOS, 0.0) / 12
    slope[0, 1] = slope[1, 1] = 0
    found = replayed(plan, verl(log_prob_grad=slope))
    assert found["first_difference"]["stage"] == "gradient"
    assert found["first_difference"]["reason"].endswith("the mean over all tokens of the batch")
    assert 0.9 < found["gradient"]["cosine"] < 1


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 1), min_size=4, max_size=4), st.integers(0, 3))
def test_a_difference_of_one_number_is_found_where_it_is(plan: Plan, rewards: list[int], rollout: int) -> None:
    """Whatever the rewards: one advantage that is changed is the first difference, at its place."""
    scores = np.zeros((4, 4))
    scores[range(4), [length - 1 for length in LENGTHS]] = rewards
    advantages = np.zeros((4, 4))
    for i in (0, 2):
        if rewards[i] != rewards[i + 1]:
            advantages[i : i + 2] = per_token((np.array([*rewards]) * 2.0 - 1) * ADVANTAGE)[i : i + 2]
    columns = verl(token_level_scores=scores, token_level_rewards=scores, pg_losses=None, loss=None)
    assert replayed(plan, columns | {"advantages": advantages})["first_difference"] is None
    advantages[rollout, 1] += 0.25
    first = replayed(plan, columns | {"advantages": advantages})["first_difference"]["first"]
    assert (first["rollout"], first["token"]) == (rollout, 1)
    assert first["theirs"] - first["ours"] == pytest.approx(0.25, abs=1e-5)


# --- files and options


def unpickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"responses": Evil()}))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("executed"),))


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle": (unpickled, "a pickle of more than tensors and plain values"),
    "empty": (lambda p: p.write_bytes(b""), "is empty"),
    "cut parquet": (lambda p: p.write_bytes(b"PAR1" + bytes(40)), "cannot be read: Arrow"),
    "cut zip": (lambda p: p.write_bytes(b"PK\x03\x04" + bytes(40)), "cannot be read: BadZipFile"),
    "no json": (lambda p: p.write_text('{"a": 1}\n{nonsense\n'), "line 2: "),
    "list of numbers": (lambda p: p.write_text("[1, 2]"), "rollout 0 is of type int"),
    "text": (lambda p: p.write_bytes(b"\xff\xfe\x00garbage"), "cannot be read: UnicodeDecodeError"),
    "nothing known": (lambda p: p.write_text('{"a": [1]}'), "no field of a batch was found (fields: a)"),
    "no rewards": (lambda p: p.write_text(json.dumps({"prompt": ["a"], "completion": ["b"]})), "no rewards were found"),
    "counts": (
        lambda p: p.write_text(json.dumps({"prompt": ["a"], "completion": ["b", "c"], "reward": [1, 2]})),
        "fields have different numbers of rollouts: completion 2, prompt 1, reward 2",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_an_error_that_teaches(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, message = FILES[name]
    make(tmp_path / "bad")
    with pytest.raises(DataError) as error:
        dump_of(recognise(read_columns(tmp_path / "bad")))
    assert message in str(error.value)
    assert not (tmp_path / "executed").exists()


def nan_at(plane: np.ndarray) -> np.ndarray:
    plane = plane.copy()
    plane[1, 2] = np.nan
    return plane


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old_log_probs": nan_at(OLD)}, "old_log_probs: rollout 1, response token 2 is nan"),
        ({"old_log_probs": OLD[:, :2]}, "old_log_probs: rollout 0 has 2 values; expected 3"),
        ({"response_mask": MASK * 0, "attention_mask": None}, "response_mask is 0 everywhere"),
        ({"response_mask": None, "attention_mask": None}, "no mask of the responses was found"),
        ({"prompts": None, "attention_mask": None}, "give --group-size"),
        ({"responses": [["a"]] * 4}, "responses: it contains values other than numbers"),
        ({"advantages": ["a"] * 4}, "advantages: could not convert string to float: 'a'; expected one number per"),
    ],
)
def test_fields_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as error:
        dump_of(recognise(verl(**changes)))
    assert message in str(error.value)


def test_options_that_do_not_fit_are_named(plan: Plan) -> None:
    with pytest.raises(ConfigError, match="no column 'speed'"):
        dump_of(recognise(verl()), rewards=["speed"])
    with pytest.raises(ConfigError, match="4 rollouts are not a multiple of 3"):
        dump_of(recognise(verl()), group_size=3)
    with pytest.raises(ConfigError, match="a replay reads only the algorithm"):
        replay_plan(None, ["steps=3"], ())
    with pytest.raises(RlsdkError, match="reads values"):
        Replay(dump_of(recognise(verl())), replay_plan("ppo", (), ()))
    with pytest.raises(ConfigError, match="'dpo' reads ref_logprobs; add it to the file"):
        Replay(dump_of(recognise(verl(ref_log_prob=None))), replay_plan("dpo", (), ()))


def test_a_recorded_loss_that_is_not_finite_is_not_compared(plan: Plan) -> None:
    dump = dump_of(recognise(verl(loss=float("nan"))))
    assert dump.numbers == {}
    assert dump.notes[-1] == "loss has no finite number and is not compared"


def test_a_rollout_without_a_reward_is_excluded_and_reported(plan: Plan) -> None:
    found = replayed(plan, {"prompt": ["a"] * 3, "completion": ["x"] * 3, "reward": [1.0, None, 0.0]})
    assert found["rollouts"] == 2
    assert "1 of 3 rollouts are left out: no reward, or no sampled token" in found["notes"]


def test_every_name_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "replay.md").read_text()
    names = {name for fields in NAMES.values() for each in fields.values() for name in each}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


# --- the command


def test_the_command_prints_json_alone_and_a_table_for_people(tmp_path: Path) -> None:
    file = tmp_path / "batch.npz"
    np.savez(file, **verl(loss=float(losses(verl()["advantages"]).sum() / 12)))
    run = CliRunner(env={"COLUMNS": "200"})
    found = json.loads(run.invoke(root, ["replay", str(file), "algorithm.kl_coef=0", "--json"]).stdout)
    assert found["first_difference"]["stage"] == "loss"
    shown = run.invoke(root, ["replay", str(file), "--algorithm", "{use: grpo, aggregate: token-mean}"])
    assert shown.exit_code == 0, shown.output
    assert "no difference" in shown.output
    wrong = run.invoke(root, ["replay", str(file), "--algorithm", "gpro"])
    assert wrong.exit_code == 2
    assert "unknown algorithm 'gpro'" in wrong.output
    assert run.invoke(root, ["replay", str(tmp_path / "none.pt")]).exit_code != 0


def test_zeros_are_shown_without_a_sign(tmp_path: Path) -> None:
    file = tmp_path / "one.npz"
    np.savez(file, **{name: value[:1] for name, value in verl(loss=None).items() if np.ndim(value)})
    shown = CliRunner().invoke(root, ["replay", str(file)])
    assert (shown.exit_code, "0 (0 to 0)" in shown.output, "-0 " in shown.output) == (0, True, False), shown.output


def test_a_model_is_refused_for_a_file_without_tokens(tmp_path: Path) -> None:
    file = tmp_path / "7.jsonl"
    file.write_text('{"input": "q", "output": "x", "score": 1.0}\n')
    refused = CliRunner().invoke(root, ["replay", str(file), "--checkpoint", str(MODEL)])
    assert (refused.exit_code, "holds no token ids" in refused.output) == (2, True)


@pytest.mark.slow
def test_a_model_gives_logprobs_and_the_gradient_of_its_weights(tmp_path: Path) -> None:
    plan = replay_plan(None, ["algorithm.kl_coef=0"], ())
    from rlsdk.whatif.gradients import Gradients
    from rlsdk.whatif.question import WhatIfQuestion

    gradients = Gradients(WhatIfQuestion(plan, plan, False, {}), MODEL)
    dump = dump_of(recognise(verl(log_probs=None, old_log_probs=None, pg_losses=None, loss=None, advantages=None)))
    first = Replay(dump, plan, gradients=gradients)
    exact = np.zeros((4, 4))
    exact[MASK] = first.found.batch.fields["logprobs"]
    assert (exact[MASK] < 0).all()
    assert first.result()["gradient"]["weights"]["cosine"] == pytest.approx(1.0)
    right = verl(log_probs=None, old_log_probs=exact, pg_losses=None, loss=None)
    found = Replay(dump_of(recognise(right)), plan, gradients=gradients).result()
    assert stage(found, "logprobs")["equal"]
    shifted = np.zeros((4, 4))
    shifted[:, 1:] = exact[:, :-1]
    wrong = verl(log_probs=None, old_log_probs=np.where(MASK, shifted, 0), pg_losses=None, loss=None)
    found = Replay(dump_of(recognise(wrong)), plan, gradients=gradients).result()
    assert found["first_difference"]["stage"] == "logprobs"
    assert found["first_difference"]["reason"] == "off by one: theirs are those of the token before"
