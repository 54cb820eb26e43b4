"""Requirements of an algorithm's parts: lengths, defaults in other sections, and incompatible parts."""

from __future__ import annotations

import pytest
import torch

import rlsdk
from rlsdk.config import check
from rlsdk.config.plan import with_defaults
from rlsdk.contracts import RewardSpec, RunFacts
from rlsdk.errors import ConfigError

MULTI_TURN = "workflow={use: dialogue, turns: 2}"


@pytest.fixture
def teacher(tmp_path):
    """A folder that reads as another model."""
    folder = tmp_path / "teacher"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


# --- defaults for other sections


def test_dapo_samples_dynamically_and_punishes_what_comes_near_the_limit(plan):
    found = plan("algorithm=dapo", "sampling.max_tokens=14")
    assert found.config.rollout.dynamic_sampling is True
    assert found.defaulted == {"rollout.dynamic_sampling": True}
    assert found.tree["rollout"] == {"dynamic_sampling": True}  # as config.yaml shows it
    assert [(s.name, s.options["max_length"]) for s in found.shaping] == [("core/overlong", 14)]
    assert plan("algorithm=grpo").config.rollout.dynamic_sampling is False


def test_what_the_configuration_says_wins_over_the_algorithms_default(file, plan):
    found = plan("algorithm=dapo", "rollout.dynamic_sampling=false")
    assert (found.config.rollout.dynamic_sampling, found.defaulted) == (False, {})
    file.write_text(file.read_text() + "rollout: {dynamic_sampling: false, oversample: 0.5}\n")
    found = plan("algorithm=dapo")
    assert (found.config.rollout.dynamic_sampling, found.config.rollout.oversample) == (False, 0.5)


def test_an_algorithms_default_joins_what_its_section_says(file, plan):
    file.write_text(file.read_text() + "rollout: {oversample: 0.5}\n")
    section = plan("algorithm=dapo").config.rollout
    assert (section.dynamic_sampling, section.oversample) == (True, 0.5)


def test_a_name_in_place_of_a_section_stays():
    tree = {"rollout": {"buffer": "fifo"}}
    assert with_defaults(tree, {"rollout.buffer.use": "priority"}) == (tree, {})
    assert with_defaults(tree, {"rollout.stop.use": "all"})[0]["rollout"] == {
        "buffer": "fifo",
        "stop": {"use": "all"},
    }
    assert tree == {"rollout": {"buffer": "fifo"}}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"rollout.dynamic_samplin": True},
            "rollout.dynamic_samplin: unknown key 'dynamic_samplin', did you mean",
        ),
        ({"sampling.max_tokens": "many"}, "sampling.max_tokens: expected int, got 'many'"),
        ({"algorithm.kl_coef": 0.1}, "algorithm.kl_coef: is a part of the algorithm itself; set its field"),
    ],
)
def test_wrong_defaults_of_an_algorithm_are_faults(plan, wrong, text):
    odd = rlsdk.algorithm("odd", defaults=wrong)
    tree = {**plan().tree, "algorithm": odd}
    with pytest.raises(ConfigError) as caught:
        check(tree)
    (fault,) = caught.value.faults
    assert fault.startswith(f"algorithm.defaults: {text}")


# --- lengths


def test_a_length_of_null_is_max_tokens(plan):
    assert plan("algorithm=dr_grpo", "sampling.max_tokens=14").loss.norm == 14.0
    assert plan("algorithm=dr_grpo", "algorithm.norm=3000").loss.norm == 3000.0
    assert plan("algorithm.aggregate=seq-mean-token-sum-norm").loss.norm == 256.0
    assert plan("algorithm=grpo").loss.norm is None
    found = plan("algorithm.shaping=[overlong, {use: overlong, max_length: 200}]")
    assert [s.options["max_length"] for s in found.shaping] == [256, 200]


def test_a_plugins_option_that_is_a_length_gets_max_tokens(plan):
    @rlsdk.advantage("short", lengths=("budget",))
    def short(x: rlsdk.CreditInputs, *, budget: int | None = None) -> torch.Tensor: ...

    found = check({**plan().tree, "algorithm": {"use": "grpo", "advantage": short}, "sampling": {"max_tokens": 99}})
    assert found.advantage.options == {"budget": 99}


@pytest.mark.parametrize(
    ("overrides", "path", "text"),
    [
        (("max_length: 20480",), "max_length", "begins above 16384 tokens, and no response here has more than 256"),
        (("max_length: 300, buffer: 44",), "max_length", "begins above 256 tokens, and no response"),
        (("buffer: 4096",), "buffer", "at most max_length=256; got 4096"),
    ],
)
def test_a_punishment_that_no_answer_can_earn_is_a_fault(faults, overrides, path, text):
    (fault,) = faults(f"algorithm.shaping=[{{use: overlong, {overrides[0]}}}]")
    assert fault.startswith(f"algorithm.shaping[0].{path}: ") and text in fault


def test_a_penalty_for_length_that_no_answer_can_earn_is_a_fault(plan, faults):
    penalty = "reward=[countdown, {{use: length_penalty, free: {}, limit: 800, unit: {}}}]"
    (fault,) = faults(penalty.format(256, "tokens"))
    assert fault.startswith("reward[1].free: 256: the penalty begins above that many tokens")
    assert plan(penalty.format(255, "tokens")) and plan(penalty.format(256, "words"))
    assert plan(penalty.format(256, "tokens"), MULTI_TURN)


def test_a_greedy_answer_is_not_compared_with_rewards_that_a_shaping_changed(plan, faults):
    for shaping in ("overlong", "{use: reward_norm, by: batch}"):
        (fault,) = faults("algorithm=remax", f"algorithm.shaping=[kl_penalty, {shaping}]")
        assert fault.startswith("algorithm.advantage: its baseline is the reward of the greedy answer as it was scored")
    assert plan("algorithm=remax").shaping  # the KL is charged to what was sampled


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ("advantage={std_normalize: false, std_over: batch}", "advantage.std_over: 'batch' given, but std_normalize"),
        ("advantage={use: opmd, tau: 0.5}", "advantage.tau: 0.5 given, but the mean has no temperature"),
        ("filters=[{use: pass_rate, low: 0.5, high: 0.5}]", "filters[0].low: 0.5 with high=0.5: no share is above"),
        ("shaping=[{use: kl_penalty, horizon: 500}]", "shaping[0].horizon: 500 given, but without a target the"),
        ("shaping=[{use: kl_penalty, coef: 0, target: 1}]", "shaping[0]: coef is 0, which adapting multiplies"),
    ],
)
def test_options_without_effect_are_a_fault(faults, part, fault):
    (found,) = faults(f"algorithm.{part}")
    assert found.startswith(f"algorithm.{fault}")


def test_options_of_an_algorithm_that_have_an_effect_are_accepted(plan):
    assert plan("algorithm.advantage={std_over: batch}") and plan("algorithm=dr_grpo") and plan("algorithm=opmd")
    assert plan("algorithm={use: opmd, advantage: {baseline: logavgexp, tau: 0.5}}")
    assert plan("algorithm.shaping=[{use: kl_penalty, coef: 0}]")
    assert plan("algorithm.shaping=[{use: kl_penalty, target: 1, horizon: 500}]")


@pytest.mark.parametrize(
    ("part", "path"),
    [
        ("shaping=[{use: reward_clip, low: 2, high: 1}]", "shaping[0].low: 2 is above high=1"),
        ("correction={use: mis, low: 3}", "correction.low: 3 is above high=2"),
        ("correction={use: geometric, high: 0.9}", "correction.low: 0.999 is above high=0.9"),
        ("policy_loss={use: clip_cov, cov_low: 6}", "policy_loss.cov_low: 6 is above cov_high=5"),
    ],
)
def test_bounds_that_nothing_is_within_are_a_fault(faults, part, path):
    (fault,) = faults(f"algorithm.{part}", "old_logprobs=learner")
    assert fault == f"algorithm.{path}: no number is within these bounds"


def test_a_response_of_several_turns_is_as_long_as_the_model_holds(plan, faults):
    assert plan("algorithm.shaping=[{use: overlong, max_length: 2000}]", MULTI_TURN).shaping
    (fault,) = faults("algorithm.shaping=[{use: overlong, max_length: 20480}]", MULTI_TURN)
    assert "no response here has more than 2047" in fault


def test_a_norm_that_is_not_a_length_is_a_fault(faults):
    (fault,) = faults("algorithm=dr_grpo", "algorithm.norm=0")
    assert fault == "algorithm.norm: a length above 0, or null for sampling.max_tokens; got 0.0"


# --- the ratio to the sampler


@pytest.mark.parametrize("correction", sorted(rlsdk.names("correction")))
def test_a_correction_without_effect_is_a_fault(plan, faults, correction):
    assert plan(f"algorithm.correction={correction}").loss.correction is not None
    (fault,) = faults(f"algorithm.correction={correction}", "old_logprobs=rollout")
    assert fault.startswith(f"algorithm.correction: correction '{correction}' weights by old_logprobs")
    assert "every weight is 1; set old_logprobs=learner, or leave it out" in fault


def test_decoupled_ppo_without_effect_is_a_fault(plan, faults):
    assert plan("algorithm=decoupled_ppo").loss.policy_loss.name == "core/decoupled_ppo"
    (fault,) = faults("algorithm=decoupled_ppo", "old_logprobs=rollout")
    assert fault.startswith("algorithm.policy_loss: policy_loss 'decoupled_ppo' weights by old_logprobs")
    assert plan("algorithm=ppo", "old_logprobs=rollout").loss.correction is None


def test_with_demonstrations_and_samples_old_logprobs_are_always_the_learners(plan):
    assert plan("algorithm=mix", "algorithm.correction=tis", "old_logprobs=rollout").loss.correction is not None


def test_a_correction_without_sampled_tokens_is_a_fault(faults):
    (fault,) = faults("algorithm=sft", "algorithm.correction=tis")
    assert "but nothing is sampled; leave it out" in fault


@pytest.mark.parametrize("loss", ["decoupled_ppo", "topr"])
def test_weighing_twice_is_a_fault(plan, faults, loss):
    (fault,) = faults(f"algorithm.policy_loss={loss}", "algorithm.correction=tis")
    assert fault.startswith(
        "algorithm.correction: correction 'tis' weights tokens by their ratio to the sampler, and so"
    )
    assert f"policy_loss '{loss}' itself" in fault
    assert plan(f"algorithm.policy_loss={loss}", "algorithm.correction=token_mask").loss.correction is not None


def test_a_plugins_loss_says_that_it_weighs_by_the_sampler(plan):
    @rlsdk.policy_loss("mine", corrects="old")
    def mine(x: rlsdk.LossInputs) -> torch.Tensor: ...

    tree = {**plan().tree, "algorithm": {"use": "grpo", "policy_loss": mine, "correction": "mis"}}
    with pytest.raises(ConfigError) as caught:
        check(tree, ["old_logprobs=rollout"])
    assert [fault.partition(":")[0] for fault in caught.value.faults] == [
        "algorithm.policy_loss",
        "algorithm.correction",
        "algorithm.correction",
    ]


# --- several corrections


def used(reference):
    """Names and options of a correction, or of each of several."""
    return [(each.name.removeprefix("core/"), dict(each.options)) for each in reference.singles.values()]


def test_several_corrections_are_one_reference_with_parts(plan):
    found = plan("algorithm.correction=[tis, {use: divergence_mask, level: max}]")
    assert used(found.loss.correction) == [("tis", {}), ("divergence_mask", {"level": "max"})]
    assert found.loss.correction.name == "tis × divergence_mask"
    changed = plan(
        "algorithm.correction=[tis, token_mask]", "algorithm.correction.0.cap=3", "algorithm.correction[1].low=0.8"
    )
    assert used(changed.loss.correction) == [("tis", {"cap": 3}), ("token_mask", {"low": 0.8})]


@pytest.mark.parametrize("given", ["tis", "{use: tis, cap: 3}"])
def test_a_list_of_one_correction_is_that_correction(plan, given):
    alone, listed = plan(f"algorithm.correction={given}"), plan(f"algorithm.correction=[{given}]")
    assert listed.loss == alone.loss
    assert listed.algorithm == alone.algorithm
    assert plan("algorithm.correction=[]").loss.correction is None


def test_options_of_several_corrections_are_checked_and_may_change(plan, faults):
    found = faults("algorithm.correction=[{use: tis, cap: 0}, token_maks, {use: mis, low: 3}]")
    assert [fault.partition(":")[0].removeprefix("algorithm.correction") for fault in found] == [
        "[0].cap",
        "[1]",
        "[2].low",
    ]
    (fault,) = faults("algorithm.correction=[tis, {low: 0.5}]")
    assert fault.startswith("algorithm.correction[1]: does not name a component: write {use: NAME, …}")
    (fault,) = faults("algorithm.correction={cap: 3}")
    assert fault.startswith("algorithm.correction: does not name a component: write {use: NAME, …}")
    found = plan("algorithm.correction=[tis, {use: token_mask, high: {from: 4, to: 2, over: 3}}]")
    assert list(found.schedules) == ["correction.1.high"]


def test_corrections_that_both_reweight_are_a_fault(plan, faults):
    (fault,) = faults("algorithm.correction=[mis, token_mask, tis]")
    assert fault == (
        "algorithm.correction[2]: correction 'tis' weights tokens by their ratio to the sampler, and so does "
        "correction 'mis' (algorithm.correction[0]): the ratio would count twice; keep one of them, or replace one by "
        "a correction that only masks, such as 'token_mask'"
    )
    assert faults("algorithm.correction=[routing_replay, mis]")
    assert used(plan("algorithm.correction=[{use: routing_replay, cap: null}, mis]").loss.correction)
    assert plan("algorithm.policy_loss=topr", "algorithm.correction={use: routing_replay, cap: null}")


@pytest.mark.parametrize("again", ["token_mask", "{use: token_mask, high: 4}"])
def test_a_correction_that_is_given_twice_is_a_fault(plan, faults, again):
    (fault,) = faults(f"algorithm.correction=[token_mask, {again}]")
    assert fault == (
        "algorithm.correction[1]: correction 'token_mask' is also algorithm.correction[0], and the two differ in their "
        "limits at most; keep one of them, with the narrower limits"
    )
    levels = plan("algorithm.correction=[{use: divergence_mask, level: mean}, {use: divergence_mask, level: max}]")
    assert list(levels.loss.correction.singles) == ["divergence_mask", "divergence_mask_2"]


def test_one_of_several_corrections_without_effect_is_a_fault(faults):
    (fault,) = faults("algorithm.policy_loss=topr", "algorithm.correction=[token_mask, tis]")
    assert fault.startswith("algorithm.correction[1]: correction 'tis' weights tokens by their ratio to the sampler")
    found = faults("algorithm.correction=[token_mask, tis]", "old_logprobs=rollout")
    assert [fault.partition(": ")[0] for fault in found] == ["algorithm.correction[0]", "algorithm.correction[1]"]


def test_an_algorithm_may_have_several_corrections(plan):
    @rlsdk.algorithm("careful")
    class Careful(rlsdk.Algorithm):
        correction = ("tis", {"use": "geometric", "low": 0.9, "high": 1.1})

    tree = {**plan().tree, "algorithm": {"use": Careful}}
    assert used(check(tree).loss.correction) == [("tis", {}), ("geometric", {"low": 0.9, "high": 1.1})]
    other = {**tree, "algorithm": {"use": Careful, "correction": "mis"}}
    assert used(check(other).loss.correction) == [("mis", {})]


# --- loss and aggregation


@pytest.mark.parametrize("loss", ["gspo", "gspo_token", "geo_mean", "dpo", "kto"])
@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_a_loss_with_an_aggregation_that_it_is_not_defined_for_is_a_fault(faults, plan, loss, aggregate):
    (fault,) = faults(f"algorithm.policy_loss={loss}", f"algorithm.aggregate={aggregate}")
    allowed = "defined for seq-mean-token-mean"
    assert fault == f"algorithm.aggregate: policy_loss '{loss}' is {allowed}; got '{aggregate}'"
    found = plan(f"algorithm.policy_loss={loss}", "algorithm.filters=[best_worst]")
    assert found.loss.aggregate == "seq-mean-token-mean"


def test_every_named_algorithm_names_parts_that_go_together(plan, teacher):
    for name in rlsdk.names("algorithm"):
        reward = "reward=[countdown, format]" if name == "gdpo" else "reward=countdown"
        found = plan(f"algorithm={name}", f"model.reference={teacher}", reward)
        assert found.loss.policy_loss.name


def test_mix_follows_the_aggregation(plan, faults):
    for aggregate in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        assert plan("algorithm=mix", f"algorithm.aggregate={aggregate}").loss.aggregate == aggregate
    assert plan("algorithm=mix", "algorithm.policy_loss.per=token").loss.policy_loss.options["per"] == "token"
    (fault,) = faults("algorithm=mix", "algorithm.policy_loss.per=rollout")
    assert fault.startswith(
        "algorithm.policy_loss.per: 'rollout', but algorithm.aggregate='token-mean' divides by each"
    )


@pytest.mark.parametrize("rollouts", ["sampled", "demonstrations"])
def test_mix_needs_both_the_policys_samples_and_an_experts_answers(faults, rollouts):
    (fault,) = faults("algorithm=mix", f"algorithm.rollouts={rollouts}")
    assert fault == (
        "algorithm.policy_loss.mu: weighs the policy's samples against an expert's answers, and with "
        f"algorithm.rollouts={rollouts} there is only one of the two; set it to mixed, or use the policy loss 'ppo' or "
        "'sft'"
    )


# --- teacher and rewards


def test_a_model_that_would_teach_itself_is_a_fault(file, plan, faults, teacher):
    (fault,) = faults("algorithm=opd", "reward=[]")
    assert fault.startswith("algorithm.advantage: it learns from the reference model, but model.reference names none")
    own = file.parent / "model"
    assert faults("algorithm=opd", f"model.reference={own}")
    found = plan("algorithm=opd", "reward=[]", f"model.reference={teacher}")
    assert (found.needs_reference, found.rewards, found.scored) == (True, (), False)


@pytest.mark.parametrize(
    ("overrides", "reader"),
    [
        ((), "advantage 'grpo'"),
        (("algorithm=raft",), "filter 'top_k'"),
        (("algorithm=kto",), "policy_loss 'kto'"),
        (("algorithm=opd", "algorithm.filters=[nonzero_variance]"), "filter 'nonzero_variance'"),
        (("algorithm=opd", "rollout.buffer=priority"), "buffer 'priority'"),
        (("algorithm=opd", "rollout.sampler=by_pass_rate"), "sampler 'by_pass_rate'"),
    ],
)
def test_a_reward_is_asked_for_by_what_reads_it(plan, faults, teacher, overrides, reader):
    (fault,) = faults("reward=[]", f"model.reference={teacher}", *overrides)
    assert fault.startswith("reward: none given; name one, such as 'countdown'") and fault.endswith(f"by {reader}")


TWO = "reward=[{use: countdown}, {use: format, weight: 0.5}]"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("reward=countdown",), "each part of the reward separately, but the only part is 'countdown'"),
        (("reward=[countdown, {use: format, multiply: true}]",), "but 'format' is a factor (multiply)"),
        (("reward=[countdown, {use: format, range: [-1, 1]}]",), "reads 'format' before its range"),
        ((TWO, "algorithm.shaping=[kl_penalty, overlong]"), "kl_penalty, overlong would have no effect"),
    ],
)
def test_gdpo_is_refused_where_it_cannot_normalise_parts_and_add_them(faults, overrides, says):
    (fault,) = faults("algorithm=gdpo", *overrides)
    assert fault.startswith("algorithm.advantage: it ") and says in fault


def test_gdpo_is_refused_if_the_workflow_gives_the_reward(plan):
    @rlsdk.workflow("pays", rewards=True)
    async def pays(task, chat): ...

    with pytest.raises(ConfigError, match=r"the only part is .environment.; list several parts below `reward`"):
        check({**plan().tree, "reward": [], "workflow": pays, "algorithm": "gdpo"})


def test_gdpo_takes_several_parts_with_weights_and_gates(plan):
    for reward in (TWO, "reward=[{use: format, gate: 1.0}, countdown, {use: length_penalty, free: 10, limit: 20}]"):
        assert {"reward_parts", "reward_weights"} <= plan("algorithm=gdpo", reward).needs
    assert plan("algorithm={use: gdpo, rollouts: demonstrations, policy_loss: sft}").advantage


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("algorithm={use: raft, top_entropy_quantile: 0.2}",), "the policy loss 'sft' reads none"),
        (("algorithm={use: dpo, top_entropy_quantile: 0.2}",), "the policy loss 'dpo' reads none"),
        (("algorithm={use: sft, top_entropy_quantile: 0.2}",), "demonstrations have none"),
        (("algorithm.top_entropy_quantile=1.2",), "expected float"),
    ],
)
def test_a_choice_of_tokens_without_an_effect_is_a_fault(faults, overrides, says):
    (fault,) = faults(*overrides)
    assert fault.startswith("algorithm.top_entropy_quantile: ") and says in fault


def test_a_choice_of_tokens_by_entropy_asks_for_entropies(plan):
    assert "entropy" not in plan().needs
    for algorithm in ("grpo", "dapo", "ppo", "gspo", "gmpo", "mix"):
        assert "entropy" in plan(f"algorithm={{use: {algorithm}, top_entropy_quantile: 0.2}}").needs


@pytest.mark.parametrize("compares", ["old", "policy"])
def test_a_correction_by_the_policy_being_trained_has_an_effect_with_the_samplers_old_logprobs(plan, compares):
    @rlsdk.correction("far", masks=True, compares=compares)
    def far(x: rlsdk.LossInputs) -> torch.Tensor: ...

    tree = {**plan().tree, "old_logprobs": "rollout", "algorithm": {"use": "grpo", "correction": far}}
    if compares == "policy":
        assert check(tree).loss.correction.name.endswith("far")
        return
    with pytest.raises(ConfigError, match="every weight is 1"):
        check(tree)


@pytest.mark.parametrize("compares", ["old", "policy"])
def test_demonstrations_have_no_sampler_that_a_correction_could_compare_with(plan, compares):
    @rlsdk.correction("far", masks=True, compares=compares)
    def far(x: rlsdk.LossInputs) -> torch.Tensor: ...

    with pytest.raises(ConfigError, match=r"far' weights samples by their ratio .* but nothing is sampled; leave it"):
        check({**plan().tree, "algorithm": {"use": "sft", "correction": far}})


def test_a_check_sees_the_run_and_all_options(plan):
    seen = []

    def looks(run: RunFacts, options):
        seen.append((run, dict(options)))
        return [("scale", "too small")] if options["scale"] < 1 else []

    @rlsdk.advantage("looks", check=looks)
    def advantage(x: rlsdk.CreditInputs, *, scale: float = 0.5, other: int = 3) -> torch.Tensor: ...

    with pytest.raises(ConfigError) as caught:
        check({**plan().tree, "algorithm": {"use": "grpo", "advantage": advantage}, "minibatches": 2, "passes": 3})
    assert caught.value.faults == ("algorithm.advantage.scale: too small",)
    (run, options) = seen[0]
    assert options == {"scale": 0.5, "other": 3}
    assert run == RunFacts(
        teacher=False,
        max_tokens=256,
        longest_response=256,
        group_size=4,
        updates=6,
        aggregate="seq-mean-token-mean",
        rewards=("countdown",),
        reward_parts=(RewardSpec("countdown"),),
        sources=("countdown",),
    )


SAMPLER = "rollout.sampler={use: by_pass_rate, source_window: 64}"


def test_a_sampler_without_an_effect_is_a_fault(plan, faults):
    (fault,) = faults("algorithm=sft", "rollout.sampler=by_pass_rate")
    assert fault == (
        "rollout.sampler: sampler 'by_pass_rate' reads rewards, but demonstrations get none; leave it out (null)"
    )
    (fault,) = faults(SAMPLER)
    assert fault.startswith("rollout.sampler.source_window: 64 given, but 'countdown' is the only source")
    several = "tasks.train=[countdown, {use: countdown, numbers: 4, source: hard}]"
    assert plan(SAMPLER, several).sampler.options == {"source_window": 64}
    assert len(faults(SAMPLER, "critic.warmup_steps=1")) == 2  # both at once


def test_a_buffer_that_ranks_by_an_unknown_part_of_the_reward_is_a_fault(plan, faults):
    given = ("rollout.max_staleness=1", "rollout.buffer.use=priority")
    (fault,) = faults(*given, "rollout.buffer.by=reward/countdwn")
    assert fault.startswith("rollout.buffer.by: unknown part of the reward 'countdwn', did you mean 'countdown'")
    for by in ("reward/countdown", "reward", "correct"):
        plan(*given, f"rollout.buffer.by={by}")
