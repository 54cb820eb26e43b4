"""An algorithm is chosen by name, and any part of it may be replaced or changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.config import check
from rlsdk.errors import ConfigError, OptionError
from rlsdk.nano import create
from rlsdk.readiness.checks import examine
from rlsdk.schedules import EntropyTarget, Schedule


def part(plan, name):
    """Name and options of a part, as the learner or the trainer gets them."""
    found = getattr(plan, name, None) or getattr(plan.loss, name)
    return found.name, dict(found.options)


CLIPS = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 20.0}


def test_a_name_takes_the_authors_parts(plan):
    found = plan()
    assert part(found, "advantage") == ("core/grpo", {"std_normalize": True})
    assert part(found, "policy_loss") == ("core/ppo", CLIPS)
    assert part(found, "kl") == ("core/low_var", {})
    assert (found.loss.kl_coef, found.loss.aggregate) == (0.04, "seq-mean-token-mean")


def test_a_name_replaces_the_whole(file, plan):
    file.write_text(file.read_text().replace("algorithm: grpo", "algorithm: {use: grpo, kl_coef: 0.5, norm: 3}"))
    assert plan().loss.kl_coef == 0.5
    found = plan("algorithm=ppo")
    assert (found.algorithm.kl_coef, found.algorithm.norm, found.algorithm.critic) == (0.0, None, True)
    assert part(found, "advantage")[0] == "core/gae"


@pytest.mark.parametrize("written", ["algorithm: grpo", "algorithm: {use: grpo}", "algorithm: {kl_coef: 0.04}", ""])
def test_an_option_of_a_part_merges_into_what_is_there(file, plan, written):
    file.write_text(file.read_text().replace("algorithm: grpo", written))
    found = plan("algorithm.policy_loss.clip_high=0.28")
    assert part(found, "policy_loss") == ("core/ppo", {**CLIPS, "clip_high": 0.28})
    assert part(found, "advantage") == ("core/grpo", {"std_normalize": True})


def test_the_same_part_by_name_keeps_the_algorithms_options(plan):
    assert part(plan("algorithm.policy_loss=ppo"), "policy_loss") == ("core/ppo", CLIPS)
    found = plan("algorithm.policy_loss={use: ppo, clip_high: 0.3}")
    assert part(found, "policy_loss") == ("core/ppo", {**CLIPS, "clip_high": 0.3})


def test_another_part_comes_with_its_own_defaults(plan):
    found = plan("algorithm.advantage=rloo", "algorithm.policy_loss={use: gspo, clip_high: 0.001}")
    assert part(found, "advantage") == ("core/rloo", {})
    assert part(found, "policy_loss") == ("core/gspo", {"clip_high": 0.001})


def test_the_file_and_overrides_add_up(file, plan):
    text = "algorithm: {use: grpo, policy_loss: {clip_low: 0.1}, aggregate: token-mean}"
    file.write_text(file.read_text().replace("algorithm: grpo", text))
    found = plan("algorithm.policy_loss.clip_high=0.28", "algorithm.kl_coef=0")
    assert part(found, "policy_loss") == ("core/ppo", {**CLIPS, "clip_low": 0.1, "clip_high": 0.28})
    assert (found.loss.kl, found.loss.aggregate) == (None, "token-mean")


def test_lists_of_parts(plan):
    found = plan("algorithm.filters=[nonzero_variance]", "algorithm.shaping=[{use: kl_penalty, coef: 0.1}]")
    assert [f.name for f in found.filters] == ["core/nonzero_variance"]
    assert [(s.name, dict(s.options)) for s in found.shaping] == [("core/kl_penalty", {"coef": 0.1})]
    assert found.needs_reference
    assert [f.name for f in plan("algorithm.filters=nonzero_variance").filters] == ["core/nonzero_variance"]


def test_an_item_of_a_list_of_the_file_is_changed(file, plan):
    text = "algorithm: {use: ppo, shaping: [kl_penalty]}"
    file.write_text(file.read_text().replace("algorithm: grpo", text))
    found = plan("algorithm.shaping[0].coef=0.2")
    assert [(s.name, dict(s.options)) for s in found.shaping] == [("core/kl_penalty", {"coef": 0.2})]


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        (
            "algorithm.policy_los.clip_high=1",
            "algorithm.policy_los: unknown option 'policy_los', did you mean 'policy_loss'?",
        ),
        (
            "algorithm.policy_loss.clip_hi=1",
            "algorithm.policy_loss.clip_hi: unknown option 'clip_hi', did you mean 'clip_high'?",
        ),
        ("algorithm.kl_coef=low", "algorithm.kl_coef: expected float, got 'low'"),
        ("algorithm.advantage=3", "algorithm.advantage: expected the name of a component"),
        ("algorithm.aggregate=mean", "algorithm.aggregate: expected 'token-mean' | "),
        ("algorithm.filters=[3]", "algorithm.filters[0]: expected the name of a component"),
    ],
)
def test_faults_of_parts_have_their_path(faults, override, fault):
    (found,) = faults(override)
    assert found.startswith(fault)


def test_learner_and_engine_take_options_without_a_name(file, plan):
    assert dict(plan("learner.zero_stage=2").learner.options) == {"zero_stage": 2}
    assert plan("learner.zero_stage=2").learner.name == "core/deepspeed"
    file.write_text(file.read_text().replace("engine: transformers\n", ""))
    assert plan("engine=transformers").engine.name == "core/transformers"
    assert plan().engine.name == "core/vllm"


def test_an_algorithm_of_a_plugin(plan, site):
    code = """
        import attrs, rlsdk
        from rlsdk.components import Use

        @rlsdk.algorithm("calm")
        @attrs.frozen(kw_only=True)
        class Calm(rlsdk.Algorithm):
            '''Grpo, but calmer.'''

            policy_loss: Use = Use("lab/soft", {"temperature": 0.3})
            kl_coef: float = 0.5
            kl: Use | None = Use("k2")

        @rlsdk.policy_loss("soft")
        def soft(x, *, temperature: float = 1.0, power: int = 2): ...
    """
    site.install("lab", {"lab.py": code}, plugins={"lab": "lab"})
    found = plan("algorithm=lab/calm", "algorithm.policy_loss.power=3")
    assert part(found, "policy_loss") == ("lab/soft", {"temperature": 0.3, "power": 3})
    assert part(found, "kl") == ("core/k2", {})
    assert part(found, "advantage")[0] == "core/grpo"


def test_floats_may_be_schedules(plan):
    found = plan(
        "algorithm.policy_loss.clip_high={from: 0.4, to: 0.2, over: 100}",
        "algorithm.kl_coef={from: 0, to: 0.1, over: 10, shape: cosine}",
        "algorithm.shaping={use: kl_penalty, coef: {from: 0.01, to: 0.0, over: 5}}",
    )
    assert found.schedules == {
        "policy_loss.clip_high": Schedule(0.4, 0.2, 100),
        "kl_coef": Schedule(0.0, 0.1, 10, "cosine"),
        "shaping.0.coef": Schedule(0.01, 0.0, 5),
    }
    assert found.loss.kl_coef == found.schedules["kl_coef"]
    assert part(found, "kl") == ("core/low_var", {})  # the coefficient is 0 at the first step alone
    assert (found.algorithm.kl_coef, found.needs_reference) == (0.1, True)
    assert plan().schedules == {}


def test_the_entropy_bonus_may_have_a_target(plan, faults):
    found = plan("algorithm.entropy_coef={target: 0.2, max: 0.5}")
    assert found.loss.entropy_coef == EntropyTarget(target=0.2, max=0.5)
    assert (found.algorithm.entropy_coef, found.schedules) == (0.5, {})
    with pytest.raises(OptionError, match=r"coef\.target: unknown option"):  # only the algorithm's own weight has one
        found.plugins.resolve(found.plugins.reference("shaping", "kl_penalty", {"coef": {"target": 0.2}}))
    wrong = {
        "{target: -1, dleta: 1}": ["target: expected float > 0, got -1", "dleta: unknown option 'dleta', did you mean"],
        "{target: .inf}": ["target: expected a finite number, got inf"],
        "{target: 1, initial: 2}": ["initial: expected a weight from min=0 to max=1, got 2"],
        "{initial: 1}": ["target: is required (float > 0)"],
        "{from: 1, to: 2, target: 3}": ["from: unknown option 'from'", "to: unknown option 'to'"],
    }
    for given, texts in wrong.items():
        said = faults(f"algorithm.entropy_coef={given}", "algorithm.kl_coef=x")
        assert len(said) == len(texts) + 1
        assert all(any(each.startswith(f"algorithm.entropy_coef.{text}") for each in said) for text in texts)


def test_a_target_is_refused_for_a_learner_that_may_not_follow_it(plan, tmp_path):
    create(tmp_path / "policy", largest=100)
    own = {"plugins": (Path(__file__).parents[1] / "packages" / "frozen_v1" / "my_learner.py",)}
    path = f"model.path={tmp_path / 'policy'}"
    for coef, refused in (("{target: 0.2}", ["algorithm.entropy_coef"]), ("0.1", [])):
        found = plan(path, "learner=my_learner/my_learner", f"algorithm.entropy_coef={coef}", **own)
        said = [fault.path for fault in examine(found, starts=False).faults]
        assert [path for path in said if "entropy" in path] == refused


def test_wrong_schedules_are_faults_under_their_paths(faults):
    found = faults(
        "algorithm.policy_loss.clip_high={from: 0.4, too: 0.2, over: -1}",
        "algorithm.shaping={use: kl_penalty, coef: {from: x, to: 0.0, over: 5}}",
        "algorithm.advantage.std_normalize={from: 0.0, to: 1.0, over: 5}",
    )
    assert sorted(fault.partition(":")[0] for fault in found) == [
        "algorithm.advantage.std_normalize",
        "algorithm.policy_loss.clip_high.over",
        "algorithm.policy_loss.clip_high.to",
        "algorithm.policy_loss.clip_high.too",
        "algorithm.shaping[0].coef.from",
    ]
    assert faults("algorithm.entropy_coef={from: 0.4, to: 0.2, over: 0}") == (
        "algorithm.entropy_coef.over: expected int >= 1, got 0",
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"clip_high": 0.28}, "; the algorithm's policy_loss has it: algorithm.policy_loss.clip_high"),
        ({"std_normalize": False}, "; the algorithm's advantage has it: algorithm.advantage.std_normalize"),
        ({"advantage": "rloo", "std_normalize": False}, "; known: advantage, "),
    ],
)
def test_an_option_of_a_part_set_on_the_algorithm_is_refused_with_its_key(plan, given, said):
    with pytest.raises(ConfigError) as caught:
        check({**plan().tree, "algorithm": {"use": "grpo", **given}})
    (fault,) = caught.value.faults
    name = list(given)[-1]
    assert fault.startswith(f"algorithm.{name}: unknown option {name!r}{said}")
