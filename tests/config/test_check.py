"""The check reports all faults at once, with path, value, expectation and nearest valid name."""

from __future__ import annotations

import pytest

import rlsdk
from rlsdk.config import check
from rlsdk.config.rules import steps_of_epochs
from rlsdk.contracts import RewardSpec
from rlsdk.errors import ConfigError

WRONG = """
name: trial
model: {path: ./nowhere, dtype: float}
tasks: {train: countdown}
reward: countdown
stepps: 3
seed: "0"
batch_size: 4k
max_invalid: 2%
group_size: true
sampling: {temperature: [1], stop: "</answer>"}
eval: {evry: 5, samples: '[1,2]'}
checkpoint: {export: lst}
workflow: single_tun
learner: {use: deepspeed, zero_stage: two}
trackers: [tensorbord]
placement: 2
out: ${nowhere}
"""


def by_path(faults):
    return {path: text for path, _, text in (fault.partition(": ") for fault in faults)}


def test_a_right_configuration_passes(plan):
    found = plan()
    assert found.config.name == "trial"
    assert found.config.algorithm.name == "grpo"
    assert [part.rule.name for part in found.rewards] == ["countdown"]
    assert found.engine.name == "core/transformers"
    assert found.workflow.name == "core/single_turn"
    assert found.folder.as_posix() == "runs/trial"


def test_every_fault_is_reported_at_once(file, faults):
    file.write_text(WRONG)
    found = by_path(faults())
    assert found["stepps"] == "unknown key 'stepps', did you mean 'steps'?"
    assert found["model.dtype"].startswith("expected 'float32' | 'bfloat16' | 'float16', got 'float'")
    assert found["seed"].startswith("expected int, got '0'; it is text")
    assert found["batch_size"] == "expected int, got '4k'; write the plain number without a unit"
    assert found["max_invalid"] == "expected float, got '2%'; write the plain number without a unit"
    assert found["group_size"] == "expected int, got True"
    assert found["sampling.temperature"] == "expected float, got [1]"
    assert found["sampling.stop"].startswith("expected list of str, got '</answer>'")
    assert found["eval.evry"].startswith("unknown key 'evry', did you mean 'every'?")
    assert "in the wrong quotes" in found["eval.samples"]
    assert found["checkpoint.export"] == "expected 'last' | 'every' | 'never', got 'lst'; did you mean 'last'?"
    assert found["workflow"].endswith("did you mean 'single_turn'?")
    assert found["trackers[0]"].startswith("unknown tracker 'tensorbord'; core offers: ")
    assert found["placement"].startswith("expected a mapping such as {engines: …, ")
    assert found["out"].startswith("'${nowhere}' cannot be resolved")
    assert found["learner.zero_stage"].endswith("got 'two'")
    assert len(found) == 16


def test_what_is_required_is_named(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ConfigError) as caught:
        check(tmp_path / "empty.yaml")
    assert {"name": "is required", "model": "is required", "tasks": "is required"}.items() <= by_path(
        caught.value.faults
    ).items()


def test_parts_are_checked_even_where_values_are_wrong(faults):
    found = by_path(
        faults("steps=x", "tasks.train=countdwn", "tasks.eval=nothing", "reward=[countdown, {use: formt}]")
        + faults("steps=x", "algorithm={use: grpo, policy_loss: pppo, filters: [x]}", "engine={use: vllm, speed: 1}")
    )
    assert found["tasks.train"].startswith("unknown tasks 'countdwn'; core offers: ")
    assert found["tasks.eval"].startswith("unknown tasks 'nothing'")
    assert found["reward[1]"].startswith("unknown reward 'formt'")
    assert found["algorithm.policy_loss"].startswith("unknown policy_loss 'pppo'")
    assert found["algorithm.filters[0]"].startswith("unknown filter 'x'")
    assert found["engine.speed"].startswith("unknown option 'speed'")
    assert found["steps"] == "expected int or null, got 'x'"


def test_options_of_components_are_checked_before_anything_starts(faults):
    found = by_path(faults("reward={use: countdown, format_scor: 0.1, score: high}"))
    assert found["reward.format_scor"].startswith("unknown option 'format_scor', did you mean 'format_score'?")
    assert found["reward.score"] == "expected float, got 'high'"


def test_an_option_that_refers_to_nothing_is_not_also_called_missing(faults, monkeypatch):
    monkeypatch.delenv("RLSDK_TEST_NOWHERE", raising=False)
    (found,) = faults("tasks.train={use: parquet, path: '${oc.env:RLSDK_TEST_NOWHERE}/train.parquet'}")
    assert found.startswith("tasks.train.path: '${oc.env:RLSDK_TEST_NOWHERE}/train.parquet' cannot be resolved")
    (found,) = faults("steps=${oc.env:RLSDK_TEST_NOWHERE}")
    assert found.startswith("steps: '${oc.env:RLSDK_TEST_NOWHERE}' cannot be resolved")


@pytest.mark.parametrize(
    ("override", "path", "text"),
    [
        ("steps=null", "steps", "neither steps nor epochs is given; give one of them"),
        ("epochs=1", "steps", "steps=2 and epochs=1.0 are given; give one of them"),
        ("steps=0", "steps", "at least 1, got 0"),
        ("name=''", "name", "'' cannot name a folder"),
        ("name=..", "name", "'..' cannot name a folder"),
        ("name=/tmp", "name", "'/tmp' cannot name a folder; expected 1 to 200 characters without '/'"),
        ("name=../keep", "name", "'../keep' cannot name a folder"),
        ('name="a\\e[2Jb"', "name", "cannot name a folder"),
        ("max_prompt_tokens=0", "max_prompt_tokens", "at least 1, got 0"),
        ("eval.samples=0", "eval.samples", "at least 1, got 0"),
        ("placement.learners=0", "placement.learners", "at least 1, got 0"),
        ("placement.engine_resources={room: -1}", "placement.engine_resources.room", "at least 0.0001, got -1"),
        ("critic.resources={CPU: 2}", "critic.resources.CPU", "Ray's own resource; name one that `ray start"),
        ("checkpoint.keep=0", "checkpoint.keep", "at least 1, got 0"),
        ("canary.tolerance=-0.1", "canary.tolerance", "at least 0, got -0.1"),
        ("watchdog.warn=0", "watchdog.warn", "seconds above 0, got 0.0"),
        ("profile.steps=[0]", "profile.steps", "got [0]"),
        ("profile.ranks=[1]", "profile.ranks", "placement.learners=1 has the ranks 0 to 0; got [1]"),
        ("placement.peak_tflops=0", "placement.peak_tflops", "at least 0.001, got 0.0"),
        ("watchdog.end=0", "watchdog.end", "seconds above 0, or null for never; got 0.0"),
        ("watchdog.busy=0", "watchdog.busy", "seconds above 0, or null for any time; got 0.0"),
        ("watchdog.learner_busy=-1", "watchdog.learner_busy", "seconds above 0, or null for any time; got -1.0"),
        ("minibatches=17", "minibatches", "17 of 16 rollouts leaves some empty"),
        ("max_invalid=1.5", "max_invalid", "a share between 0 and 1, got 1.5"),
        ("sampling.temperature=0", "sampling.temperature", "above 0 to learn from samples, got 0.0"),
        ("sampling.top_p=0", "sampling.top_p", "above 0 and at most 1, got 0.0"),
        ("sampling.top_k=-1", "sampling.top_k", "at least 0, got -1"),
        ("eval.top_p=1.5", "eval.top_p", "above 0 and at most 1, got 1.5"),
        ("eval.top_k=-1", "eval.top_k", "at least 0, got -1"),
        ("eval.temperature=0", "eval.temperature", "above 0, got 0.0: the sampled answers have it"),
        ("sampling.top_p=0.95", "sampling.top_p", "top_p=0.95, top_k=0 sample from part of the vocabulary"),
        ("sampling={top_k: 20}", "sampling.top_k", "Leave both out while training (top_p: 1, top_k: 0)"),
        (
            "sampling.max_tokens=2048",
            "model.max_length",
            "2048 tokens cannot hold a prompt and sampling.max_tokens=2048",
        ),
        ("eval.max_tokens=2048", "model.max_length", "2048 tokens cannot hold a prompt and eval.max_tokens=2048"),
        ("reward=[]", "reward", "none given; name one, such as 'countdown'"),
        ("algorithm.policy_loss.clip_high=-1", "algorithm.policy_loss.clip_high", "expected float >= 0, got -1"),
        ("algorithm.policy_loss.dual_clip=0.5", "algorithm.policy_loss.dual_clip", "expected float >= 1 or null"),
        ("algorithm.correction={use: tis, cap: 0}", "algorithm.correction.cap", "expected float > 0, got 0"),
        ("algorithm.kl_coef=-1", "algorithm.kl_coef", "expected float >= 0, got -1"),
        ("algorithm.shaping=[{use: overlong, penalty: -1}]", "algorithm.shaping[0].penalty", "expected float >= 0"),
        ("reward={use: math, tolerance: -1}", "reward.tolerance", "expected float >= 0 and < 1, got -1"),
        ("learner.lr=-1", "learner.lr", "expected float >= 0, got -1"),
        ("learner.betas=[0.9,1]", "learner.betas[1]", "expected float >= 0 and < 1, got 1"),
        ("engine.max_num_seqs=0", "engine.max_num_seqs", "expected int >= 1, got 0"),
        (f"seed={2**63}", "seed", "at most 9223372036854775807, got 9223372036854775808"),
        (f"steps={10**30}", "steps", f"at most 9223372036854775807, got {10**30}"),
        ("rollout.oversample=1e30", "rollout.oversample", "at most 1000, got 1e+30"),
        ("sampling.stop=['a','']", "sampling.stop", "an empty string would end every answer"),
        ("model.path=./nowhere", "model.path", "there is no folder './nowhere' with a config.json"),
        ("algorithm.norm=-1.0", "algorithm.norm", "a length above 0, or null for sampling.max_tokens; got -1.0"),
        ("algorithm.advantage=gae", "algorithm.critic", "the advantage reads a critic's values; set it to true"),
        ("algorithm={use: grpo, kl: null}", "algorithm.kl", "kl_coef is 0.04; name an estimator, such as 'k3'"),
        ("rollout.partial_rollouts=false", "rollout.partial_rollouts", "also set rollout.in_flight=false"),
        ("rollout.tail_batch=2", "rollout.tail_batch", "set rollout.max_staleness to 1 or more, or leave it"),
        ("rollout={max_staleness: 1, tail_batch: -2}", "rollout.tail_batch", "at least -1, got -2"),
        ("rollout.max_token_staleness=0", "rollout.max_token_staleness", "no token is stale in synchronous"),
        (
            "rollout={max_staleness: 1, max_token_staleness: 2}",
            "rollout.max_token_staleness",
            "2 is above max_staleness=1: the group expires before its tokens do; at most 1",
        ),
        (
            "rollout={max_staleness: 1, max_token_staleness: 0, replay: {share: 0.5}}",
            "rollout.replay.share",
            "too old for the next step with rollout.max_token_staleness=0; give at least 1",
        ),
        (
            "rollout.replay.most_uses=3",
            "rollout.replay.most_uses",
            "3 given, but with share=0 no group is trained again",
        ),
        ("rollout.stop=enogh", "rollout.stop", "unknown stop 'enogh'; core offers: all, enough"),
        ("rollout.stop={use: enough, shar: 1}", "rollout.stop.shar", "did you mean 'share'"),
        ("rollout.stop={use: enough, available: 1}", "rollout.stop.available", "unknown"),
    ],
)
def test_what_no_single_value_shows(faults, override, path, text):
    (fault,) = faults(override)
    assert fault.startswith(f"{path}: ")
    assert text in fault


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("sampling.temperature=.nan", "sampling.temperature: expected a finite number, got nan"),
        ("rollout.oversample=.inf", "rollout.oversample: expected a finite number, got inf"),
        ("watchdog.end=-.inf", "watchdog.end: expected a finite number or null, got -inf"),
        ("algorithm.entropy_coef=.nan", "algorithm.entropy_coef: expected a finite number, got nan"),
        ("learner.lr=.inf", "learner.lr: expected a finite number, got inf"),
        ("algorithm.kl_coef=.inf", "algorithm.kl_coef: expected a finite number, got inf"),
        ("reward={use: countdown, weight: .nan}", "reward[0].weight: expected a finite number, got nan"),
        ("seed=-1", "seed: at least 0, got -1"),
        (
            "sampling={1: 2, top_p: 1.0, x: 3}",
            "sampling.1: unknown key '1'; known: max_tokens, seeds, stop, temperature, top_k, top_p",
        ),
    ],
)
def test_non_finite_numbers_and_a_negative_seed_are_faults(faults, override, fault):
    assert fault in faults(override)


def test_limits_are_reported_along_with_a_wrong_algorithm(faults):
    found = by_path(faults("algorithm=gprpo", "batch_size=0"))
    assert found["algorithm"].endswith("did you mean 'grpo'?")
    assert found["batch_size"] == "at least 1, got 0"


def test_a_hub_id_is_taken_at_its_word(plan):
    assert plan("model=Qwen/Qwen2.5-0.5B").model.path == "Qwen/Qwen2.5-0.5B"


def test_a_shell_line_that_broke_in_two_is_explained(faults):
    (fault,) = faults("steps=3", " \\")
    assert "lost its continuation" in fault


# --- rewards, plugins, objects


def test_rewards_have_their_own_weights_and_names(plan):
    found = plan("reward=[{use: countdown, weight: 2}, {use: format, weight: 0.5}, {use: countdown, score: 3}]")
    rules = [(part.rule.name, part.rule.weight) for part in found.rewards]
    assert rules == [("countdown", 2.0), ("format", 0.5), ("countdown_2", 1.0)]
    assert dict(found.rewards[2].reference.options) == {"score": 3}


def test_staleness_below_zero_is_one_fault(faults):
    assert faults("rollout={max_staleness: -1, sync_interval: 2, max_token_staleness: 0}") == (
        "rollout.max_staleness: at least 0, got -1",
    )


def test_parts_of_a_reward_are_called_as_the_user_says(plan, faults):
    found = plan(
        "reward=[{use: countdown, metric: exact}, countdown, {use: countdown, score: 3}, {use: format, metric: tags}]"
    )
    assert [part.rule.name for part in found.rewards] == ["exact", "countdown", "countdown_2", "tags"]
    same = "another part is also called 'format'; tell them apart with `metric: NAME`"
    assert faults("reward=[{use: countdown, metric: format}, format]") == (f"reward[1]: {same}",)
    for wrong in ("mean", "a/b", "two words"):
        (fault,) = faults(f"reward=[{{use: countdown, metric: {wrong}}}]")
        assert "metric: a name of letters" in fault and repr(wrong) in fault


def test_a_weight_is_a_number(faults):
    assert faults("reward={use: countdown, weight: heavy}") == ("reward[0].weight: expected float, got 'heavy'",)


def test_parts_of_a_reward_are_gates_factors_and_routes(plan):
    found = plan(
        "reward=[{use: format, gate: 1, weight: 0.1}, {use: countdown, sources: countdown},"
        "{use: length_penalty, free: 5, limit: 9, multiply: true, range: [-1, 0]}]"
    )
    gate, route, factor = (part.rule for part in found.rewards)
    assert gate == RewardSpec("format", 0.1, gate=1.0)
    assert route == RewardSpec("countdown", sources=("countdown",))
    assert factor == RewardSpec("length_penalty", multiply=True, range=(-1.0, 0.0))


def test_a_gate_after_which_no_part_follows_is_a_fault(faults):
    text = "1, but there is no later part to gate; list the parts that it gates after it"
    assert faults("reward=[countdown, {use: format, gate: 1}]") == (f"reward[1].gate: {text}",)
    assert faults("reward={use: format, gate: 1}") == (f"reward.gate: {text}",)


def test_faults_of_parts_of_a_reward(faults):
    assert faults("reward=[{use: countdown, gate: high}, {use: format, range: [1, 1]}, format]") == (
        "reward[0].gate: expected float or null, got 'high'",
        "reward[1]: range: two different values, (low, high); got (1.0, 1.0)",
    )
    assert faults("scoring={timeout: 0, workers: -1, memory: 1}") == (
        "scoring.workers: at least 0, got -1",
        "scoring.memory: at least 64, got 1",
        "scoring.timeout: seconds above 0, got 0.0",
    )


def test_a_plugin_of_a_file_is_used_by_name(file, plan, tmp_path):
    lab = tmp_path / "lab.py"
    lab.write_text("import rlsdk\n@rlsdk.reward('mine')\ndef mine(rollout, *, scale: float = 1.0): return scale\n")
    found = plan("reward={use: lab/mine, scale: 2}", plugins=[lab])
    assert found.rewards[0].rule.name == "lab/mine"
    assert set(found.plugins.used()) == {"core", "lab"}
    assert plan(f"plugins=[{lab}]", "reward=lab/mine").rewards[0].reference.file[0] == str(lab)


def test_plugins_that_cannot_be_used_are_faults(faults, site):
    site.install("rlsdk-sad", {"sad.py": "import not_there"}, plugins={"sad": "sad"})
    found = faults("plugins=[sad, gone, gone.py]", "reward=sad/x")
    assert len([f for f in found if f.startswith("plugins: ")]) == 3
    assert any(f.startswith("plugins: plugin 'sad' (rlsdk-sad 1.0) fails to import") for f in found)


@pytest.mark.parametrize(
    ("code", "lacks"),
    [
        ("class Half:\n    def log(self, step, metrics): ...", "open, close"),
        ("def half(): ...", "open, log, close"),
    ],
)
def test_a_tracker_that_lacks_methods_is_refused_before_the_start(faults, tmp_path, code, lacks):
    (tmp_path / "lab.py").write_text(f"import rlsdk\n\n@rlsdk.tracker('half')\n{code}\n")
    found = by_path(faults("trackers=[lab/half]", plugins=[tmp_path / "lab.py"]))
    assert found["trackers[0]"].startswith(
        f"'lab/half' lacks {lacks}, which every tracker must have; `rlsdk check lab`"
    )


def test_a_tracker_that_passes_its_methods_on_is_accepted(plan, tmp_path):
    code = "class Proxy:\n    def __getattr__(self, name):\n        return print\n"
    (tmp_path / "lab.py").write_text(f"import rlsdk\n\n@rlsdk.tracker('proxy')\n{code}")
    assert plan("trackers=[lab/proxy]", plugins=[tmp_path / "lab.py"]).trackers[0].name == "lab/proxy"


def test_a_broken_plugin_is_reported_once_with_its_line(faults, tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("import rlsdk\n\nlimit = undefined + 1\n")
    (found,) = faults("reward=[bad/text, bad/other]", plugins=[file])
    assert found == (
        f"plugins: plugin 'bad' ({file}) fails to import: NameError: name 'undefined' is not defined ({file}, line 3)"
    )


def test_a_plugin_that_is_not_installed_is_one_fault_with_all_its_places(faults):
    named = ("workflow=mylab/y", "reward=[countdown, mylab/x]", "algorithm={use: grpo, policy_loss: mylab/z}")
    for broken in ((), ("steps=x",)):  # the second check reads only the components
        found = [fault for fault in faults(*named, *broken) if "mylab" in fault]
        assert len(found) == 1
        assert "unknown plugin 'mylab'" in found[0] and found[0].count("mylab'") == 1
        for place in ("workflow", "reward[1]", "algorithm.policy_loss"):
            assert place in found[0]
    (found,) = faults("workflow=mylab/y", "reward=countdown")
    assert found.startswith("workflow: unknown plugin 'mylab'") and "also named" not in found


def test_components_that_are_not_offered_are_faults_of_their_own(faults):
    assert len(faults("reward=[countdwn, formt]")) == 2


def test_a_plugin_file_that_is_missing_is_reported_once_with_the_nearest(faults, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("")
    monkeypatch.chdir(tmp_path)
    (found,) = faults("reward=my_reward/text", plugins=["my_reward.py"])
    assert found == (
        "plugins: plugin file my_reward.py cannot be read: No such file or directory "
        f"(working folder: {tmp_path.name}/); did you mean my_rewards.py?"
    )


def test_a_name_of_another_kind_is_answered_with_its_kind(faults, tmp_path):
    (tmp_path / "bad.py").write_text("import rlsdk\n@rlsdk.reward('text')\ndef text(rollout): return 1.0\n")
    found = faults("algorithm.filters=[text]", plugins=[tmp_path / "bad.py"])
    assert "; bad/text is of kind reward" in found[0]
    (found,) = faults("algorithm.filters=[bad/text]", plugins=[tmp_path / "bad.py"])
    assert found == "algorithm.filters[0]: unknown filter 'bad/text'; bad offers: none; bad/text is of kind reward"
    (found,) = faults(f"reward='{tmp_path}/bad.py:text'")
    assert found.endswith(f"(in a configuration: plugins: [{tmp_path}/bad.py]), and name its component: bad/text")


def test_a_forgotten_prefix_is_suggested(faults, tmp_path):
    (tmp_path / "bad.py").write_text("import rlsdk\n@rlsdk.reward('text')\ndef text(rollout): return 1.0\n")
    (found,) = faults("reward=text", plugins=[tmp_path / "bad.py"])
    assert found.startswith("reward: unknown reward 'text'; core offers: ")
    assert found.endswith("; did you mean 'bad/text'?")


@pytest.mark.parametrize(
    ("override", "path", "near", "known"),
    [
        ("reward=[{use: countdown, wieght: 1}]", "reward.wieght", "weight", "gate, metric, multiply, range, score"),
        ("tasks.train={use: countdown, sorce: a}", "tasks.train.sorce", "source", "source"),
        ("reward={use: countdown, format_scor: 1}", "reward.format_scor", "format_score", "weight"),
    ],
)
def test_keys_next_to_options_are_suggested_like_options(faults, override, path, near, known):
    (found,) = faults(override)
    assert found.startswith(f"{path}: unknown option '{path.rpartition('.')[2]}', did you mean {near!r}?")
    assert known in found


def test_an_installed_plugin_that_is_not_named_is_not_imported(plan, site):
    site.install("rlsdk-sad", {"sad.py": "import not_there"}, plugins={"sad": "sad"})
    assert set(plan().plugins.used()) == {"core"}


@rlsdk.reward("mine")
def mine(rollout, *, scale: float = 1.0) -> float:
    """Mine."""
    return scale


def test_a_marked_object_stands_where_a_name_stands(file):
    config = {
        "name": "script",
        "model": str(file.parent / "model"),
        "tasks": {"train": "countdown"},
        "reward": [{"use": mine, "scale": 2, "weight": 0.5}, "countdown"],
        "steps": 1,
        "engine": "transformers",
    }
    found = check(config, ["steps=3"])
    assert found.config.steps == 3
    assert [p.rule.name for p in found.rewards] == ["test_check/mine", "countdown"]  # as the kept source is called
    assert found.plugins.resolve(found.rewards[0].reference)(None) == 2.0
    assert "test_check" in found.plugins.used()
    assert check({**config, "reward": mine}).rewards[0].reference.obj is mine
    with pytest.raises(ConfigError, match=r"reward\.scal: unknown option 'scal', did you mean 'scale'"):
        check({**config, "reward": {"use": mine, "scal": 2}})
    with pytest.raises(ConfigError, match=r"algorithm: .*is marked as reward 'mine'; expected here: algorithm"):
        check({**config, "algorithm": mine})


# --- what follows from the parts


@pytest.mark.parametrize(
    ("overrides", "sampled", "reference", "critic", "engine"),
    [
        ((), True, True, False, True),
        (("algorithm.kl_coef=0",), True, False, False, True),
        (("algorithm=ppo",), True, True, True, True),
        (("algorithm={use: ppo, shaping: []}",), True, False, True, True),
        (("algorithm=sft", "reward=[]"), False, False, False, False),
        (("algorithm=sft", "tasks.eval=countdown"), False, False, False, True),
    ],
)
def test_what_a_run_holds(plan, overrides, sampled, reference, critic, engine):
    found = plan(*overrides)
    held = (found.sampled, found.needs_reference, found.algorithm.critic, found.needs_engine)
    assert held == (sampled, reference, critic, engine)


def test_demonstrations_are_learned_from_by_default_where_nothing_is_sampled(plan):
    assert plan("algorithm=sft").workflow.name == "core/demonstration"
    assert plan("algorithm=sft").loss.temperature == 1.0
    assert plan("algorithm={use: dpo, rollouts: demonstrations}").workflow.name == "core/chosen_rejected"
    assert plan("algorithm=dpo").workflow.name == "core/single_turn"


def test_held_out_tasks_have_the_workflow_of_the_training_or_their_own(plan, faults):
    assert plan("algorithm=sft").eval_workflow.name == "core/single_turn"
    assert plan("workflow=dialogue").eval_workflow == plan("workflow=dialogue").workflow
    own = plan("algorithm=sft", "eval.workflow={turns: 3, use: dialogue}")
    assert (own.workflow.name, own.eval_workflow.name) == ("core/demonstration", "core/dialogue")
    assert own.eval_workflow.options == {"turns": 3}
    (fault,) = faults("reward=[]", "workflow=environment", "eval.workflow=single_turn")
    assert fault.startswith("eval.workflow: 'core/single_turn' gives no rewards")
    (fault,) = faults("eval.workflow={use: dialogue, turn: 3}")
    assert fault.startswith("eval.workflow.turn: ")


def test_a_workflow_that_gives_rewards_itself_scores_an_evaluation(plan):
    assert plan("algorithm=sft", "reward=[]").rewards == ()
    (reward,) = plan("algorithm=sft", "reward=[]", "eval.workflow=environment").rewards
    assert reward.reference.name == "core/environment"


def test_several_sources_of_tasks(plan, faults):
    sources = "[{use: countdown, weight: 3}, {use: countdown, split: test, source: hard}]"
    found = plan(f"tasks.train={sources}", f"tasks.eval={sources}")
    assert [(s.name, s.weight, s.renamed) for s in found.tasks_train] == [
        ("countdown", 3.0, False),
        ("hard", 1.0, True),
    ]
    assert [s.name for s in found.tasks_eval] == ["countdown", "hard"]
    found = by_path(
        faults("tasks.train=[countdown, {use: countdown, sise: 3}, countdown, {use: countdown, weight: x, source: a}]")
    )
    assert "tasks.train[3].weight" in found
    found = by_path(faults("tasks.train=[countdown, {use: countdown, sise: 3}, countdown]"))
    assert found["tasks.train[1].sise"].startswith("unknown option")
    assert "tell them apart with `source: NAME`" in found["tasks.train[2]"]
    assert by_path(faults("tasks.train={use: countdown, weight: -1}"))["tasks.train"].startswith(
        "expected weights of at least 0"
    )
    assert by_path(faults("tasks.train=[]"))["tasks.train"].startswith("expected at least one source of tasks")


def test_the_buffer_is_a_component_under_its_section(plan, faults):
    assert plan().buffer.name == "core/fifo"
    assert plan("rollout.buffer=stalest_first").buffer.name == "core/stalest_first"
    found = plan("rollout.buffer.use=priority", "rollout.buffer.by=reward").buffer
    assert (found.name, found.options) == ("core/priority", {"by": "reward"})
    assert by_path(faults("rollout.buffer=lifo"))["rollout.buffer"].startswith("unknown buffer 'lifo'")
    assert "rollout.buffer.step" in by_path(faults("rollout.buffer={use: fifo, step: 3}"))


@pytest.mark.parametrize(
    ("epochs", "tasks", "batch", "steps"),
    [(1.1, 100, 10, 11), (1, 100, 10, 10), (1, 101, 10, 11), (0.5, 3, 4, 1), (0.07, 100, 7, 1), (2, 7, 7, 2)],
)
def test_epochs_are_whole_batches(plan, epochs: float, tasks: int, batch: int, steps: int) -> None:
    config = plan("steps=null", f"epochs={epochs}", f"batch_size={batch}").config
    assert steps_of_epochs(config, tasks) == steps


def test_replayed_groups_must_be_young_enough(plan, faults):
    found = by_path(faults("rollout.replay.share=0.5"))
    assert "give at least 1" in found["rollout.replay.share"]
    assert plan("rollout.replay.share=0.5", "rollout.max_staleness=1").config.rollout.replay.most_uses == 2
    found = by_path(faults("rollout.replay={share: 0.9, most_uses: 1}", "batch_size=1", "rollout.sync_interval=2"))
    assert "leaves no new group" in found["rollout.replay.share"]
    assert "at least 2" in found["rollout.replay.most_uses"]


def test_a_password_belongs_into_no_configuration(plan, faults, monkeypatch):
    monkeypatch.delenv("NO_SUCH_PASSWORD", raising=False)
    for url in ("postgresql+psycopg://me:hush@db/runs", "postgresql+psycopg://db/runs?password=hush"):
        text = "\n".join(faults(f"rollout.storage.url={url}"))
        assert "rollout.storage.url: contains a password; set password_env to an environment variable" in text
        assert "hush" not in text
    found = by_path(faults("rollout.storage={url: mysql://db/runs, password_env: NO_SUCH_PASSWORD}"))
    assert found["rollout.storage.url"].startswith("expected a URL such as postgresql+psycopg://")
    assert "'NO_SUCH_PASSWORD' is not set" in found["rollout.storage.password_env"]
    assert plan("rollout.storage.url=postgresql+psycopg://me@db/runs").config.rollout.storage.url


@pytest.mark.parametrize(
    ("section", "ahead"),
    [
        ("{}", False),
        ("{in_flight: false}", False),
        ("{max_staleness: 1, max_token_staleness: 1, tail_batch: -1}", True),
        ("{oversample: 0.5, tail_batch: 2}", True),
        ("{stop: {use: enough, share: 0.5}}", True),
        ("{stop: core/all}", False),
        ("{sync_interval: 2, in_flight: false, partial_rollouts: false}", True),
    ],
)
def test_settings_of_production_that_go_together(plan, section, ahead):
    found = plan(f"rollout={section}")
    assert found.config.rollout.runs_ahead is ahead
    assert found.stop.name == ("core/enough" if "enough" in section else "core/all")


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("engines=2", "engines: unknown key 'engines', did you mean placement.engines?"),
        ("kl_coef=0.1", "kl_coef: unknown key 'kl_coef', did you mean algorithm.kl_coef?"),
        (
            "sampling.group_size=4",
            "sampling.group_size: unknown key 'group_size', did you mean group_size at the top level?",
        ),
        ("every=2", "every: unknown key 'every', did you mean eval.every or checkpoint.every?"),
        ("temperature=1.0", "temperature: unknown key 'temperature'; TRL's temperature is sampling.temperature"),
        ("lerner={lr: 1}", "lerner: unknown key 'lerner', did you mean 'learner'?"),  # not veRL's lr
        (  # not Trinity-RFT's log.level
            "tasks.train={use: jsonl, path: x.jsonl, columns: {prompt: q, level: l}}",
            "tasks.train.columns.level: unknown key 'level'; known: answer, demonstration, id, prompt, source",
        ),
    ],
)
def test_a_key_in_the_wrong_section_is_told_where_it_belongs(faults, override, found):
    (fault,) = faults(override)
    assert fault.startswith(found)
