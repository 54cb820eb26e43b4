"""Marks attach a component, change nothing else, and are not inherited."""

from __future__ import annotations

import dataclasses
import functools
import re

import attrs
import pytest

import rlsdk
from rlsdk import marks
from rlsdk.components import Use, component_of, own_mark
from rlsdk.errors import OptionError, PluginError
from rlsdk.kinds import KINDS
from rlsdk.options import structure
from rlsdk.testing import check_component


@rlsdk.reward("exact", batch=False)
def exact(rollout, *, scale: float = 1.0) -> float:
    """Full marks or nothing.

    Second paragraph.
    """
    return scale * float(rollout == "right")


@rlsdk.environment("maze")
@attrs.define(kw_only=True)
class Maze:
    """A maze."""

    size: int = attrs.field(default=4, validator=attrs.validators.ge(2))


class Bigger(Maze):
    """Not marked itself."""


def test_there_is_a_mark_for_each_kind():
    for kind in KINDS:

        @getattr(rlsdk, kind)("thing")
        class thing(rlsdk.Algorithm):
            def __init__(self, *groups): ...
            def __call__(self, *arguments, **supplied): ...

        found = own_mark(thing)
        assert (found.kind, found.name, found.obj) == (kind, "thing", thing)


def test_a_mark_returns_what_it_marked():
    def plain(rollout): ...

    assert rlsdk.reward("plain")(plain) is plain
    assert own_mark(plain).summary == ""
    assert own_mark(exact).summary == "Full marks or nothing."


def test_marks_carry_what_the_core_must_know():
    def loss(x): ...

    assert own_mark(rlsdk.policy_loss("a", needs=("entropy",), whole_batch=True)(loss)).whole_batch
    assert own_mark(loss).needs == ("entropy",)
    assert own_mark(rlsdk.reward("b", batch=True)(lambda rollouts: rollouts)).batch


def test_a_component_is_found_from_what_was_made_of_it():
    for obj in (exact, own_mark(exact), own_mark(exact).bind()):
        assert component_of(obj) is own_mark(exact)
    assert component_of(own_mark(Maze).bind({"size": 5})) is own_mark(Maze)
    assert component_of("exact") is None
    assert component_of(None) is None


def test_a_subclass_does_not_inherit_a_mark():
    assert component_of(Bigger) is None
    assert component_of(Bigger()) is None


def test_a_function_is_bound_with_its_options():
    bound = own_mark(exact).bind({"scale": 3})
    assert (bound("right"), bound("wrong"), bound.__name__) == (3.0, 0.0, "exact")


def test_a_class_is_made_with_its_options():
    assert own_mark(Maze).bind().size == 4


@pytest.mark.parametrize(
    ("mark", "options", "path"),
    [(exact, {"scale": "3"}, "scale"), (exact, {"scal": 3}, "scal"), (Maze, {"size": 1}, "")],
)
def test_options_are_checked_when_bound(mark, options, path):
    with pytest.raises(OptionError) as caught:
        own_mark(mark).bind(options)
    assert [fault[0] for fault in caught.value.faults] == [path]
    assert caught.value.component == f"{own_mark(mark).kind} {own_mark(mark).name!r}"


def test_one_object_has_one_mark():
    with pytest.raises(PluginError, match="marked twice, as reward 'exact' and kl 'k'"):
        rlsdk.kl("k")(exact)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_mark_takes_a_name(name):
    with pytest.raises(PluginError, match=r"@rlsdk.reward takes a name, @rlsdk.reward\('my_reward'\)"):
        rlsdk.reward(name)


@pytest.mark.parametrize("name", ["my reward", "my\nreward", " exact", "exact\t", "ex\x1bact"])
def test_a_name_has_no_spaces_or_control_characters(name):
    with pytest.raises(PluginError, match="a name has no spaces, line breaks or control characters"):
        rlsdk.reward(name)


def test_a_stop_rule_or_buffer_that_does_not_take_what_it_is_called_with_is_explained():
    def ready(*, available, wanted):
        return available >= wanted

    def oldest(group, *, step):
        return step

    with pytest.raises(PluginError, match=r"called as ready\(available=…, target=…\), but is defined as ready\(\*, av"):
        rlsdk.stop("ready")(ready)
    with pytest.raises(PluginError, match=r"called as oldest\(group, step=…, uses=…\), but is defined as oldest"):
        rlsdk.buffer("oldest")(oldest)


def test_a_mark_without_brackets_is_explained():
    def right(rollout):
        return 1.0

    with pytest.raises(PluginError, match=r"@rlsdk.reward takes a name; write @rlsdk.reward\('right'\) above right$"):
        rlsdk.reward(right)


@pytest.mark.parametrize("kind", ["reward", "filter", "field", "algorithm"])
def test_a_mark_without_a_name_is_explained(kind):
    with pytest.raises(PluginError, match=rf"^@rlsdk.{kind} takes a name; write @rlsdk.{kind}\('my_{kind}'\)$"):
        getattr(rlsdk, kind)()


@dataclasses.dataclass
class Data:
    limit: int = 3

    def __call__(self, rollout): ...


class Limited:
    """Its option is positional."""

    def __init__(self, limit=3): ...

    def __call__(self, rollout): ...


class Needy:
    def __init__(self, path): ...
    def __call__(self, rollout): ...


def limited(rollout, limit=3): ...


def estimate(logprobs, ref_logprobs, clamp=10.0, *, scale=1.0): ...


async def revise(task, chat, rounds: int = 2): ...


def squares(count=3, *, split): ...


def cubes(split): ...


@pytest.mark.parametrize(
    ("kind", "obj", "message"),
    [
        ("reward", limited, "no config can set limit, .* write def limited(rollout, *, limit=3)"),
        ("reward", Limited, "no config can set limit, .* write def __init__(self, *, limit=3)"),
        ("reward", Needy, "no config can set path, .* write def __init__(self, *, path)"),
        ("reward", Data, "no config can set limit, .* write @dataclass(kw_only=True) above class Data"),
        ("kl", estimate, "clamp, .* write def estimate(logprobs, ref_logprobs, *, clamp=10.0, scale=1.0)"),
        ("workflow", revise, "rounds, .* write def revise(task, chat, *, rounds=2)"),
        ("tasks", squares, "count, .* write def squares(*, count=3, split)"),
        ("tasks", cubes, "split, .* write def cubes(*, split)"),
    ],
)
def test_an_option_that_is_not_keyword_only_is_refused(kind, obj, message):
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    with pytest.raises(PluginError, match=rf"^@rlsdk.{kind}\('x'\): .*{pattern}$"):
        getattr(rlsdk, kind)("x")(obj)


def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...


class Box:
    def exact(self, rollout): ...


async def varied(group): ...


class Varied:
    async def __call__(self, group): ...


class Two:
    def __call__(self, x, y): ...


class Keyed:
    def __call__(self, rollout, *, ignore_case): ...


class Nothing: ...


class Momentum:
    def __init__(self, groups, momentum=0.9): ...


class Unfed:
    def __init__(self, *, lr=0.1): ...


@pytest.mark.parametrize(
    ("kind", "obj", "message"),
    [
        ("advantage", Two, "it is called as Two.__call__(x), but is defined as Two.__call__(self, x, y)"),
        ("buffer", Two, "called as Two.__call__(group, step=…, uses=…), but is defined as Two.__call__(self, x, y)"),
        ("reward", Keyed, "called as Keyed.__call__(rollout), but is defined as Keyed.__call__(self, rollout, .*"),
        ("stop", Nothing, "Nothing has no method __call__(self, available, target)"),
        ("optimizer", Unfed, "called as Unfed.__init__(groups), but is defined as Unfed.__init__(self, *, lr=0.1)"),
        ("optimizer", Momentum, "no config can set momentum, .* write def __init__(self, groups, *, momentum=0.9)"),
        ("reward", compute_score, "called as compute_score(rollout), but is defined as compute_score(data_source, .*"),
        ("reward", compute_score, "a reward of another trainer .* {use: foreign, path: .*"),
        ("reward", Box.exact, "defined as exact(self, rollout); mark a function outside of a class, or the class"),
        ("kl", varied, "called without await; write def"),
        ("kl", compute_score, "called as compute_score(logprobs, ref_logprobs), .*"),
        ("workflow", varied, "called as varied(task, chat), but is defined as varied(group)"),
        ("filter", varied, "varied is async def, but is called without await; write def"),
        ("filter", Varied, "Varied is async def, .*"),
    ],
)
def test_what_the_kind_cannot_call_is_refused(kind, obj, message):
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    with pytest.raises(PluginError, match=rf"^@rlsdk.{kind}\('x'\): .*{pattern}$"):
        getattr(rlsdk, kind)("x")(obj)


def test_a_parameter_with_a_leading_underscore_is_no_option():
    @rlsdk.reward("memo")
    def memo(rollout, _seen={}):  # noqa: B006
        """Reward of a text's length, remembered."""
        return _seen.setdefault(rollout.text, float(len(rollout.text)))

    assert own_mark(memo).options == ()
    assert {found.rule: found.outcome for found in check_component(memo)}["contract"] == "passed"


def test_a_library_missing_from_a_constructor_is_reported_with_its_place():
    @rlsdk.environment("needy")
    class Needy:
        def __init__(self):
            import no_such_library  # noqa: F401

    with pytest.raises(
        PluginError, match=r"^environment 'needy' cannot be created: ModuleNotFoundError: .*, line \d+\)$"
    ):
        own_mark(Needy).bind()


def test_a_constructor_that_exits_is_reported_and_does_not_end_the_process():
    @rlsdk.environment("leaving")
    class Leaving:
        def __init__(self):
            raise SystemExit(3)

    with pytest.raises(PluginError, match=r"^environment 'leaving' cannot be created: SystemExit: 3 \(.*, line \d+\)$"):
        own_mark(Leaving).bind()


def test_what_may_wait_may_be_async():
    for kind in ("shaping", "advantage", "reward"):

        async def judged(x): ...

        assert own_mark(getattr(rlsdk, kind)(kind)(judged)).is_async


def test_a_reward_whose_calls_or_state_an_actor_would_lose_is_refused():
    async def asks(rollout): ...

    class Counts:
        def __call__(self, rollout): ...
        def state(self): ...
        def restore(self, state): ...

    with pytest.raises(PluginError, match="asks is async def, but an actor calls it without await; write def, or"):
        rlsdk.reward("x", runs="actor")(asks)
    with pytest.raises(PluginError, match=r"Counts has state\(\), but checkpoints hold no state of an actor; leave"):
        rlsdk.reward("x", runs="actor")(Counts)


def test_a_private_default_is_not_an_option():
    @rlsdk.reward("memo")
    def memo(rollout, _seen={}): ...  # noqa: B006

    assert own_mark(memo).options == ()


def test_a_reward_that_takes_a_list_is_marked_so():
    def typed(answers: list[rlsdk.Rollout]): ...

    def named(rollouts): ...

    for function in (typed, named):
        with pytest.raises(PluginError, match=r"takes a list, but gets one rollout; mark it with batch=True"):
            rlsdk.reward("x")(function)
        assert own_mark(rlsdk.reward("x", batch=True)(function)).batch


def test_a_mark_adds_the_prefix_itself():
    with pytest.raises(PluginError, match="give the name without '/'"):
        rlsdk.reward("mylab/exact")


@pytest.mark.parametrize("obj", [functools.partial(print), len, 3], ids=["partial", "builtin", "number"])
def test_functions_and_classes_are_marked_and_nothing_else(obj):
    with pytest.raises(PluginError, match="marks a function or a class"):
        rlsdk.reward("x")(obj)


@pytest.mark.parametrize(
    ("written", "name", "options"),
    [
        ("grpo", "grpo", {}),
        ({"use": "mylab/a", "scale": 1}, "mylab/a", {"scale": 1}),
        (exact, exact, {}),
        ({"use": exact, "scale": 2}, exact, {"scale": 2}),
    ],
)
def test_ways_to_choose_a_component(written, name, options):
    used, faults = structure(written, Use)
    assert faults == []
    assert (used.name, dict(used.options)) == (name, options)


@pytest.mark.parametrize("written", ["", 3, None, {}, {"scale": 1}, ["grpo"], lambda: None])
def test_what_chooses_no_component(written):
    _, ((path, text),) = structure(written, Use)
    assert path == ""
    assert "{use: NAME, …}" in text


def test_the_marks_are_public():
    assert set(KINDS) < set(rlsdk.__all__)
    assert all(getattr(rlsdk, kind) is getattr(marks, kind) for kind in KINDS if kind != "algorithm")
