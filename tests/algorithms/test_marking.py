"""Marked algorithms: a plain class, or only defaults, becomes a class; the plugin's own names resolve first."""

from __future__ import annotations

import os
import subprocess
import sys

import attrs
import cloudpickle
import pytest

import rlsdk
from rlsdk.algorithms.named import GRPO
from rlsdk.components import component_of, own_mark
from rlsdk.config import check
from rlsdk.errors import ConfigError, PluginError
from rlsdk.plugins import Plugins
from rlsdk.testing.conformance import check_component

Use = rlsdk.Use
LAB = """
    import rlsdk

    @rlsdk.policy_loss("soft_clip")
    def soft_clip(x, *, temperature: float = 0.3, power: int = 2): ...

    @rlsdk.policy_loss("cispo")
    def cispo(x): ...

    @rlsdk.shaping("bonus")
    def bonus(x): ...

    @rlsdk.algorithm("msoft")
    class MSoft(rlsdk.Algorithm):
        policy_loss = "soft_clip"
        shaping = "bonus"
        filters = ["nonzero_variance"]

    @rlsdk.algorithm("objects")
    class Objects(rlsdk.Algorithm):
        policy_loss = soft_clip
        advantage = {"use": "grpo", "std_normalize": False}

    @rlsdk.algorithm("shadows")
    class Shadows(rlsdk.Algorithm):
        policy_loss = "cispo"
        advantage = "rloo"

    calm = rlsdk.algorithm("calm", policy_loss={"use": "soft_clip", "temperature": 0.1}, advantage="rloo")
"""


@rlsdk.policy_loss("soft")
def soft(x, *, temperature: float = 0.3):
    """A loss."""
    return -x.advantages * x.logprobs * temperature


@rlsdk.algorithm("softly")
class Softly(rlsdk.Algorithm):
    """An algorithm that names its part by object."""

    policy_loss = soft
    kl_coef: float = 0.5
    kl = "k2"


@pytest.fixture
def lab(site):
    site.install("rlsdk-lab", {"lab.py": LAB}, plugins={"lab": "lab"})
    return site


def part(plan, name):
    """Name and options of a part, as the learner or the trainer gets them."""
    found = getattr(plan, name, None) or getattr(plan.loss, name)
    return found.name, dict(found.options)


@pytest.fixture
def plan(tmp_path):
    """The plan of a small run with an algorithm and overrides."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    small = {"name": "x", "model": str(model), "tasks": {"train": "countdown"}, "reward": "countdown", "steps": 1}
    return lambda algorithm, *overrides, **more: check({**small, "algorithm": algorithm, **more}, overrides)


# --- what the mark makes


def test_a_plain_subclass_becomes_a_class_of_defaults():
    made = Softly()
    assert (made.policy_loss, made.kl, made.kl_coef) == (Use(soft), Use("k2"), 0.5)
    assert (made.advantage, made.filters) == (Use("grpo"), ())
    assert own_mark(Softly).obj is Softly
    assert Softly.__doc__ == "An algorithm that names its part by object."
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        made.kl_coef = 1.0
    with pytest.raises(TypeError, match="positional"):
        Softly(0.1)


def test_text_mappings_objects_and_single_items_become_parts():
    @rlsdk.algorithm("all")
    class All(rlsdk.Algorithm):
        advantage = {"use": "gae", "gamma": 0.9}  # noqa: RUF012
        policy_loss = rlsdk.load("policy_loss", soft, temperature=0.1)
        correction = Use("tis", {"cap": 3.0})
        shaping = "overlong"
        filters = ["nonzero_variance", {"use": "top_k", "k": 2}]  # noqa: RUF012

    made = All()
    assert made.advantage == Use("gae", {"gamma": 0.9})
    assert made.policy_loss == Use(soft, {"temperature": 0.1})
    assert made.correction == Use("tis", {"cap": 3.0})
    assert made.shaping == (Use("overlong"),)
    assert made.filters == (Use("nonzero_variance"), Use("top_k", {"k": 2}))


def test_a_built_in_algorithm_can_be_derived_from():
    @rlsdk.algorithm("mine")
    class Mine(GRPO):
        kl_coef = 0

        def helper(self): ...

    assert attrs.asdict(Mine(), recurse=False) == {**attrs.asdict(GRPO(), recurse=False), "kl_coef": 0.0}


def test_defaults_alone_make_an_algorithm():
    calm = rlsdk.algorithm("calm", advantage="rloo", policy_loss=soft, kl_coef=0)
    assert (calm().advantage, calm().policy_loss) == (Use("rloo"), Use(soft))
    assert own_mark(calm).obj is calm
    assert own_mark(calm).summary == "`rlsdk.Algorithm` with advantage `rloo`, policy_loss `soft`, kl_coef `0`."
    assert calm.__module__ == __name__


def test_an_attrs_class_still_works_and_takes_text_for_parts():
    @rlsdk.algorithm("attrs")
    @attrs.frozen(kw_only=True)
    class Written(rlsdk.Algorithm):
        policy_loss: Use = "soft"
        shaping: tuple[Use, ...] = ("overlong",)
        gamma: float = 0.9
        advantage: Use = attrs.Factory(lambda self: {"use": "gae", "gamma": self.gamma}, takes_self=True)

    assert Written().policy_loss == Use("soft")
    assert Written().shaping == (Use("overlong"),)
    assert Written(gamma=0.5).advantage == Use("gae", {"gamma": 0.5})


def test_an_option_that_another_default_reads_needs_no_attrs():
    @rlsdk.algorithm("computed")
    class WithOption(rlsdk.Algorithm):
        gamma: float = 0.9
        advantage = attrs.Factory(lambda self: {"use": "gae", "gamma": self.gamma}, takes_self=True)

    assert rlsdk.load("algorithm", WithOption, gamma=0.5).advantage == Use("gae", {"gamma": 0.5})


def refused(namespace, base=rlsdk.Algorithm):
    with pytest.raises(PluginError) as caught:
        rlsdk.algorithm("wrong")(type("Wrong", (base,), namespace))
    return str(caught.value)


@pytest.mark.parametrize(
    ("namespace", "message"),
    [
        ({"policy_los": "soft"}, "unknown field 'policy_los', did you mean 'policy_loss'"),
        ({"policy_los": "soft", "__annotations__": {"policy_los": str}}, "did you mean 'policy_loss'"),
        ({"kl_coef": "much"}, "kl_coef: expected float, got 'much'"),
        ({"policy_loss": 3}, "policy_loss: expected the name of a component, {use: NAME, …} or a marked object; got 3"),
        ({"policy_loss": lambda self, x: x}, "policy_loss: expected the name of a component"),
        ({"filters": ["a", 3]}, "filters[1]: expected the name of a component"),
        ({"aggregate": "mean"}, "aggregate: expected 'token-mean' | "),
    ],
)
def test_what_does_not_fit_is_refused_when_the_class_is_marked(namespace, message):
    text = refused(namespace)
    assert text.startswith("@rlsdk.algorithm('wrong'): ")
    assert message in text


def test_what_does_not_fit_is_refused_without_a_class_too():
    with pytest.raises(PluginError, match="unknown field 'advantages', did you mean 'advantage'"):
        rlsdk.algorithm("wrong", advantages="rloo")


def test_a_class_that_is_not_an_algorithm_is_refused_with_the_base_to_derive_from():
    for obj in (type("Plain", (), {"policy_loss": "soft"}), soft):
        with pytest.raises(PluginError, match=r"marks a class of defaults; write class \w+\(rlsdk.Algorithm\)"):
            rlsdk.algorithm("wrong")(obj)


def test_a_misspelt_field_of_an_attrs_class_is_refused():
    with pytest.raises(PluginError, match="unknown field 'kl_coeff', did you mean 'kl_coef'"):

        @rlsdk.algorithm("wrong")
        @attrs.frozen(kw_only=True)
        class Misspelt(rlsdk.Algorithm):
            kl_coeff: float = 0.0


def test_a_field_without_a_default_is_given_by_the_config(plan):
    @rlsdk.algorithm("open")
    @attrs.frozen(kw_only=True)
    class Open(rlsdk.Algorithm):
        advantage: Use

    with pytest.raises(ConfigError, match=r"algorithm\.advantage: is required"):
        plan(Open)
    assert part(plan({"use": Open, "advantage": "rloo"}), "advantage") == ("core/rloo", {})


# --- names of the algorithm's own plugin


@pytest.mark.parametrize(
    ("algorithm", "parts"),
    [
        ("lab/msoft", {"policy_loss": ("lab/soft_clip", {}), "advantage": ("core/grpo", {})}),
        ("lab/objects", {"policy_loss": ("lab/soft_clip", {}), "advantage": ("core/grpo", {"std_normalize": False})}),
        ("lab/shadows", {"policy_loss": ("lab/cispo", {}), "advantage": ("core/rloo", {})}),
        ("lab/calm", {"policy_loss": ("lab/soft_clip", {"temperature": 0.1}), "advantage": ("core/rloo", {})}),
    ],
)
def test_names_of_its_own_plugin_come_first(lab, plan, algorithm, parts):
    found = plan(algorithm)
    assert {name: part(found, name) for name in parts} == parts


def test_lists_of_parts_are_resolved_likewise(lab, plan):
    found = plan("lab/msoft")
    assert [each.name for each in found.shaping] == ["lab/bonus"]
    assert [each.name for each in found.filters] == ["core/nonzero_variance"]


def test_an_override_merges_into_a_part_of_the_plugin(lab, plan):
    found = plan("lab/calm", "algorithm.policy_loss.power=3")
    assert part(found, "policy_loss") == ("lab/soft_clip", {"temperature": 0.1, "power": 3})
    assert part(found, "advantage") == ("core/rloo", {})


def test_a_bare_name_in_a_config_is_a_built_in_component(lab, plan):
    assert part(plan({"use": "lab/msoft", "policy_loss": "cispo"}), "policy_loss")[0] == "core/cispo"


def test_loading_it_resolves_names_too(lab):
    assert rlsdk.load("algorithm", "lab/msoft").policy_loss == Use("lab/soft_clip")
    assert rlsdk.load("algorithm", "core/grpo") == GRPO()


# --- as an object, in scripts and notebooks


def test_an_algorithm_and_its_parts_may_be_objects(plan):
    found = plan(Softly)
    assert (found.loss.policy_loss.obj, found.loss.kl_coef) == (soft, 0.5)
    assert "test_marking" in found.plugins.used()  # the plugin that the run keeps their source as


SENT = """
import sys, cloudpickle, rlsdk

@rlsdk.policy_loss("soft")
def soft(x): ...

@rlsdk.algorithm("softly")
class Softly(rlsdk.Algorithm):
    policy_loss = soft
    kl_coef = 0.5

calm = rlsdk.algorithm("calm", policy_loss=soft)
sys.stdout.buffer.write(cloudpickle.dumps((Softly, calm)))
"""


def test_what_a_script_made_travels_by_value():
    sent = subprocess.run([sys.executable, "-c", SENT], capture_output=True, check=True).stdout
    softly, calm = cloudpickle.loads(sent)
    assert (component_of(softly).name, component_of(calm).name) == ("softly", "calm")
    assert softly().kl_coef == 0.5
    for made in (softly(), calm()):
        assert component_of(made.policy_loss.name).name == "soft"


TYPED = """
import sys, rlsdk
from rlsdk.plugins import Plugins
loss = rlsdk.policy_loss("loss")(lambda x: x)
advantage = {"use": "opmd", "tau": float(sys.argv[1])}
calm = rlsdk.algorithm("calm", policy_loss=loss, advantage=advantage)
print(Plugins().reference("algorithm", calm).fingerprint.source)
"""


def test_its_fingerprint_equals_that_of_its_defaults_in_every_process():
    def source(tau, seed):
        command, environment = [sys.executable, "-c", TYPED, tau], {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    assert source("1", "1") == source("1", "2")
    assert source("1", "1") != source("2", "1")


def test_it_passes_the_conformance_suite():
    assert {finding.outcome for finding in check_component(Softly)} == {"passed"}


def test_the_mark_loads_no_torch():
    code = "import sys, rlsdk; rlsdk.algorithm('x', kl_coef=0.1); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plugin_with_plain_algorithms_conforms(lab):
    plugins = Plugins()
    for name in ("msoft", "objects", "calm"):
        component = plugins.find("algorithm", f"lab/{name}")[1]
        assert component.summary
