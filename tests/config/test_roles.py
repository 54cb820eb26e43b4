"""Sections of models other than the policy: their plans, and faults found before a start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.config import Plan
from rlsdk.config.tree import as_tree
from rlsdk.learners.apart import roles, roles_apart
from rlsdk.nano import create
from rlsdk.readiness.checks import examine
from rlsdk.readiness.memory import estimate_memory

PPO = ("algorithm={use: ppo, kl: k3, kl_coef: 0.1}",)


def test_by_default_the_learner_holds_all_models(plan: Callable[..., Plan]) -> None:
    found = plan(*PPO)
    assert not found.apart and roles(found).critic == roles(found).reference == found.model


def test_models_with_separate_ranks_have_their_own_path_dtype_and_learner(
    plan: Callable[..., Plan], tmp_path: Path
) -> None:
    found = plan(
        *PPO,
        f"model.critic={tmp_path}",
        "critic={ranks: 2, dtype: bfloat16}",
        "reference={ranks: 1, learner: {zero_stage: 3}}",
    )
    held = roles_apart(found)
    assert (roles(found).critic, roles(found).reference) == (None, None)
    critic = held["critic"].critic
    assert critic is not None and (critic.path, critic.dtype) == (str(tmp_path), "bfloat16")
    assert held["reference"].reference == found.model and held["reference"].actor is None
    assert found.apart["critic"] == found.learner
    assert found.apart["reference"].options == {"zero_stage": 3}


def test_what_an_algorithm_does_not_need_is_not_started(plan: Callable[..., Plan]) -> None:
    assert not plan("algorithm={use: grpo, kl_coef: 0.0}", "critic.ranks=1", "reference.ranks=1").apart


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("critic.ranks=-1", "critic.ranks: at least 0, got -1"),
        ("reference={learner: {zero_stage: 3}}", "reference.learner: it runs the reference in dedicated processes"),
        ("critic={ranks: 1, learner: {zero_stag: 3}}", "critic.learner.zero_stag: unknown option"),
        ("critic={rank: 1}", "critic.rank: "),
    ],
)
def test_faults_are_reported_by_their_path(faults: Callable[..., tuple[str, ...]], override: str, fault: str) -> None:
    found = faults(*PPO, override)
    assert len(found) == 1 and found[0].startswith(fault)


def test_a_reference_model_with_another_tokenizer_is_found_before_a_start(
    plan: Callable[..., Plan], tmp_path: Path
) -> None:
    create(tmp_path / "policy", largest=10)
    create(tmp_path / "larger", largest=100)
    create(tmp_path / "same", largest=10)

    def said(reference: str) -> dict[str, str]:
        paths = [f"model.path={tmp_path / 'policy'}", f"model.reference={tmp_path / reference}"]
        return {fault.path: fault.message for fault in examine(plan(*PPO, *paths), starts=False).faults}

    assert "has another tokenizer than the model that is trained" in said("larger")["model.reference"]
    assert "model.reference" not in said("same")


def test_a_model_that_cannot_read_the_policys_tokens_is_found_before_a_start(
    plan: Callable[..., Plan], tmp_path: Path
) -> None:
    create(tmp_path / "policy", largest=100)
    create(tmp_path / "small", largest=10)
    paths = [f"model.path={tmp_path / 'policy'}", f"model.critic={tmp_path / 'small'}"]
    found = plan(*PPO, *paths, "critic={ranks: 3, dtype: float16, learner: {sequence_parallel: 2}}")
    said = {fault.path: fault.message for fault in examine(found, starts=False).faults}
    assert "cannot read everything that the policy may write" in said["model.critic"]
    assert "bfloat16" in said["critic.dtype"]
    remedy = "set critic.ranks=2 or 4, or change the learner's sequence_parallel=2"
    assert said["critic.ranks"].endswith(f"a multiple of 2; got 3; {remedy}")


@pytest.mark.parametrize("role", ["critic", "reference"])
def test_a_model_whose_packed_rollouts_would_attend_to_each_other_is_found_before_a_start(
    plan: Callable[..., Plan], tmp_path: Path, role: str
) -> None:
    from transformers import OPTConfig

    create(tmp_path / "policy", largest=100)
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    OPTConfig(**sizes, vocab_size=200, max_position_embeddings=64).save_pretrained(tmp_path / "opt")
    packed = "learner={use: deepspeed, rows: packed, attention: eager}"
    found = plan(*PPO, f"model.path={tmp_path / 'policy'}", f"model.{role}={tmp_path / 'opt'}", packed)
    said = {fault.path: fault.message for fault in examine(found, starts=False).faults}
    assert "does not separate packed rollouts in a OPTForCausalLM" in said[f"model.{role}"]


def test_memory_is_reported_for_each_model(plan: Callable[..., Plan], tmp_path: Path) -> None:
    from rlsdk.readiness.disk import skeleton

    create(tmp_path / "policy", largest=100)
    found = plan(*PPO, f"model.path={tmp_path / 'policy'}", "critic.ranks=2", "reference.ranks=1")
    rows = {row.role: row for row in estimate_memory(found, skeleton(found, download=False)).rows}
    assert {"learner weights", "critic", "critic process", "reference model", "reference process"} <= set(rows)
    assert rows["critic process"].processes == 2


def test_a_critic_warms_up_only_if_there_is_one_and_a_role_may_describe_it(
    plan: Callable[..., Plan], faults: Callable[..., tuple[str, ...]]
) -> None:
    assert plan(*PPO).config.critic.warmup_steps == 0
    assert plan(*PPO, "critic.warmup_steps=3").config.critic.warmup_steps == 3
    assert faults(*PPO, "critic.warmup_steps=-1") == ("critic.warmup_steps: at least 0, got -1",)
    (fault,) = faults("algorithm=grpo", "critic.warmup_steps=3")
    assert fault.startswith("critic.warmup_steps: 3 given, but the algorithm has no critic; leave it out, or")
    model, tasks = "model", rlsdk.Config.Tasks(train="countdown")
    of_role = rlsdk.Config(name="n", model=model, tasks=tasks, critic=rlsdk.Config.Role(ranks=1))
    assert of_role.critic == rlsdk.Config.Critic(ranks=1) and as_tree(of_role)["critic"] == {"ranks": 1}
    of_role = rlsdk.Config(name="n", model=model, tasks=tasks, reference=rlsdk.Config.Role(ranks=1))
    assert of_role.reference == rlsdk.Config.Reference(ranks=1)


def test_a_warm_up_is_refused_if_the_learner_cannot_train_the_critic_alone_or_if_it_never_ends(
    plan: Callable[..., Plan], tmp_path: Path
) -> None:
    create(tmp_path / "policy", largest=100)
    settings = (*PPO, f"model.path={tmp_path / 'policy'}", "critic.warmup_steps=2")

    def said(*more: str, **options: Any) -> list[str]:
        found = examine(plan(*settings, *more, **options), starts=False)
        return [fault.message for fault in found.faults if fault.path == "critic.warmup_steps"]

    own = {"plugins": (Path(__file__).parents[1] / "packages" / "frozen_v1" / "my_learner.py",)}
    assert not said("steps=3")
    (fault,) = said("steps=3", "learner=my_learner/my_learner", **own)
    assert "the learner 'my_learner/my_learner' cannot train the critic without the actor, since it" in fault
    apart = ("critic.ranks=1", "critic.learner=deepspeed")
    assert not said("steps=3", "learner=my_learner/my_learner", *apart, **own)
    for length in (["steps=2"], ["steps=null", "epochs=1", "batch_size=4", "tasks.train={use: countdown, size: 8}"]):
        (fault,) = said(*length)
        assert fault.endswith("so the actor would never be trained; give fewer than the run has")


def test_a_schedule_of_a_plugin_is_tried_at_the_first_and_the_last_step(
    plan: Callable[..., Plan], tmp_path: Path
) -> None:
    create(tmp_path / "policy", largest=100)
    (tmp_path / "falls.py").write_text(
        "import rlsdk\n\n@rlsdk.lr_schedule('falls')\ndef falls(step, steps, *, end=0.0):\n"
        "    return 1 - (1 - end) * step / (steps - 1)\n"
    )
    settings = (f"model.path={tmp_path / 'policy'}", "minibatches=2", "passes=3")

    def said(schedule: str, *more: str) -> list[str]:
        chosen = f"learner={{use: deepspeed, warmup_steps: 2, schedule: {schedule}}}"
        made = plan(*settings, chosen, *more, plugins=(tmp_path / "falls.py",))
        found = examine(made, starts=False)
        return [fault.message for fault in found.faults if fault.path == "learner.schedule"]

    assert said("falls/falls", "steps=2") == said("wsd", "steps=2") == []
    (fault,) = said("{use: falls/falls, end: -1}", "steps=2")
    assert "lr_schedule 'falls' returned -1.0 for step 9 of 10; expected the share of the peak" in fault
    (fault,) = said("falls/falls", "steps=1", "passes=1", "minibatches=3")
    assert "division by zero" in fault
    critics = (
        "algorithm=ppo",
        "critic.ranks=1",
        "critic.learner={use: deepspeed, schedule: {use: falls/falls, end: -1}}",
    )
    made = plan(*settings, *critics, "steps=2", plugins=(tmp_path / "falls.py",))
    (found,) = [each for each in examine(made, starts=False).faults if each.path.endswith("schedule")]
    assert found.path == "critic.learner.schedule" and "returned -1.0 for step 11 of 12" in found.message


KL = ("algorithm={use: grpo, kl: k3, kl_coef: 0.1}",)


def test_a_reference_model_follows_the_policy_only_if_it_is_asked_to(plan: Callable[..., Plan]) -> None:
    assert roles(plan(*KL)).reference_mix is None
    assert roles(plan(*KL, "reference.update_every=5")).reference_mix == 1
    assert roles(plan(*KL, "reference={update_every: 1, mix: 0.01}")).reference_mix == 0.01


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        ((*KL, "reference={update_every: -1}"), "reference.update_every: at least 0, got -1"),
        ((*KL, "reference={update_every: 5, mix: 0}"), "reference.mix: above 0 and at most 1, got 0"),
        ((*KL, "reference={update_every: 5, mix: 1.5}"), "reference.mix: above 0 and at most 1, got 1.5"),
        ((*KL, "reference={mix: 0.5}"), "reference.mix: 0.5 given, but with reference.update_every=0 the reference"),
        ((*KL, "reference={update_every: 5, ranks: 1}"), "reference.update_every: 5 given, but with reference.ranks=1"),
        (
            ("algorithm={use: grpo, kl_coef: 0.0}", "reference.update_every=5"),
            "reference.update_every: 5 given, but nothing reads the reference model; set algorithm.kl_coef above 0",
        ),
        ((*PPO, "critic={update_every: 5}"), "critic.update_every: unknown key"),
    ],
)
def test_a_reference_model_that_could_not_follow_is_refused(
    faults: Callable[..., tuple[str, ...]], overrides: tuple[str, ...], fault: str
) -> None:
    found = faults(*overrides)
    assert len(found) == 1 and found[0].startswith(fault)


def test_a_reference_model_that_moves_only_after_the_run_is_noted(plan: Callable[..., Plan], tmp_path: Path) -> None:
    create(tmp_path / "policy", largest=100)

    def said(*settings: str) -> list[str]:
        found = examine(plan(*KL, f"model.path={tmp_path / 'policy'}", *settings), starts=False)
        return [note.message for note in found.notes if note.path == "reference.update_every"]

    assert not said("steps=6", "reference.update_every=5") and not said("steps=5")
    (note,) = said("steps=5", "reference.update_every=5")
    assert note == "5, but the run has 5 steps: no step is trained with a reference model that has moved"
    assert said(
        "steps=null", "epochs=1", "batch_size=4", "tasks.train={use: countdown, size: 8}", "reference.update_every=2"
    )


def test_a_reference_model_of_another_shape_or_learner_is_found_before_a_start(
    plan: Callable[..., Plan], tmp_path: Path
) -> None:
    create(tmp_path / "policy", largest=100)
    create(tmp_path / "other", largest=200)
    policy, follows = f"model.path={tmp_path / 'policy'}", "reference.update_every=5"
    said = {fault.path for fault in examine(plan(*KL, policy, follows), starts=False).faults}
    assert not said & {"reference.update_every", "model.reference"}
    found = plan(*KL, policy, follows, f"model.reference={tmp_path / 'other'}", "learner={lora: {rank: 2}}")
    said = {fault.path: fault.message for fault in examine(found, starts=False).faults}
    assert "its weights cannot be mixed with those of the model that is trained: " in said["model.reference"]
    assert "lora trains an adapter beside a frozen base" in said["reference.update_every"]
    file = Path(__file__).parent.parent / "packages" / "frozen_v1" / "my_learner.py"
    found = plan(*KL, policy, follows, "learner=my_learner/my_learner", plugins=[file])
    said = {fault.path: fault.message for fault in examine(found, starts=False).faults}
    assert said["reference.update_every"] == (
        "the learner 'my_learner/my_learner' cannot move its reference model (rlsdk.contracts.MovesReference); set "
        "learner=deepspeed, or leave update_every out"
    )


LEARNER = """
import attrs
import rlsdk
from rlsdk.learners.deepspeed import DeepSpeedLearner


class Wraps:
    def __init__(self):
        self.learner = DeepSpeedLearner()

    def rank_memory(self, roles, place):
        return self.learner.rank_memory(roles, place)


@rlsdk.learner("silent")
class Silent(Wraps):
    pass


@rlsdk.learner("adapting")
class Adapting(Wraps):
    @property
    def adapts_entropy(self):
        return self.learner.adapts_entropy
"""


@pytest.mark.parametrize(("learner", "refused"), [("deepspeed", False), ("lab/silent", True), ("lab/adapting", False)])
def test_an_entropy_target_needs_a_learner_that_says_it_adapts_to_it(
    plan: Callable[..., Plan], tmp_path: Path, learner: str, refused: bool
) -> None:
    create(tmp_path / "policy", largest=100)
    (tmp_path / "lab.py").write_text(LEARNER)
    settings = (f"model.path={tmp_path / 'policy'}", f"learner={learner}", "algorithm.entropy_coef={target: 0.2}")
    found = examine(plan(*settings, plugins=[tmp_path / "lab.py"]), starts=False)
    said = [fault.message for fault in found.faults if fault.path == "algorithm.entropy_coef"]
    assert bool(said) is refused
    assert not refused or "declares rlsdk.contracts.AdaptsEntropy" in said[0]
