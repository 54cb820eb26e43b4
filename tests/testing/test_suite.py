"""The suite reports broken components; each property is violated by a component that violates no other."""

from __future__ import annotations

import asyncio
import pickle
import re
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import rlsdk
from rlsdk.components import Component
from rlsdk.errors import ConformanceFault, OptionError, UnknownComponentError
from rlsdk.kinds import KINDS
from rlsdk.testing import check_component, check_plugin, subject
from rlsdk.testing.conformance import checks, properties
from rlsdk.testing.findings import Violated, time_limit
from rlsdk.testing.properties import environments
from rlsdk.types import Observation, Step

LAB = Path(__file__).parent / "broken_lab.py"
LABS = (LAB, LAB.with_name("heavy_lab.py"))
PLUGINS = {lab: rlsdk.Plugins([lab]) for lab in LABS}  # a file that is read again gives other objects
BROKEN = [check for lab in LABS for check in checks(PLUGINS[lab], lab.stem)[0]]
WITHOUT_INPUT = {
    "opens-an-answer",
    "leaves-a-prefill-open",
    "bridges-once",
    "data-stays-data",
    "reads-answers",
    "never-raises",
    "prose-is-no-call",
    "picklable-by-reference",
    "options-documented",
    "options-typed",
    "light-import",
    "ends",
    "leaves-its-loop-free",
    "gives-rollouts",
    "describes-its-tools",
    "defaults-valid",
    "contract",
    "sized-and-indexable",
    "answers-yes-or-no",
    "more-is-enough",
    "parts-resolve",
    "parts-merge",
    "defaults-fit",
    "positive-on-average",
    "creates-an-optimizer",
    "descends",
    "obeys-its-groups",
    "skips-missing-gradients",
    "finite-on-zero-gradients",
    "resumes",
    "element-wise",
    "shares-of-the-peak",
    "same-step-same-rate",
}
"""Properties of a component alone, or of what it makes."""


OWN_PARTS = """
import rlsdk

@rlsdk.advantage("centred")
def centred(x):
    return x.rewards - x.group_mean(x.rewards)

@rlsdk.filter("varied")
def varied(group):
    return True

@rlsdk.algorithm("mine")
class Mine(rlsdk.Algorithm):
    advantage = "centred"
    filters = ("varied", "nonzero_variance")
"""


def test_an_algorithm_that_is_an_object_finds_the_parts_of_its_module(tmp_path, monkeypatch):
    (tmp_path / "own_parts_lab.py").write_text(OWN_PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    import own_parts_lab as lab

    assert [finding for finding in check_component(lab.Mine) if finding.fault is not None] == []
    algorithm = rlsdk.load("algorithm", lab.Mine)
    assert [algorithm.advantage.name, *(use.name for use in algorithm.filters)] == [
        lab.centred,
        lab.varied,
        "nonzero_variance",
    ]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless call is waited for two seconds, not ten."""
    monkeypatch.setattr(environments, "WORKFLOW_SECONDS", 2.0)


def failed(obj, options=None) -> dict[str, ConformanceFault]:
    return {f.rule: f.fault for f in check_component(obj, options) if f.fault is not None}


@pytest.mark.parametrize("check", BROKEN, ids=lambda c: f"{c.subject.component.kind}-{c.subject.component.name}")
def test_a_component_that_lacks_one_property_fails_that_one_alone(check):
    name = check.subject.component.name
    found = check.findings()
    assert [f.rule for f in found if f.outcome == "failed"] == [name]
    (fault,) = (f.fault for f in found if f.fault is not None)
    text = str(fault)
    assert text.startswith(f"{check.subject} breaks {name}: ")
    assert all(f"\n  {part}: " in text for part in ("expected", "got", "what to do"))
    has_input = name not in WITHOUT_INPUT and (check.subject.component.kind, name) != ("tasks", "deterministic")
    assert (bool(fault.given), "\n  input: " in text) == (has_input, has_input)


def test_every_property_is_broken_by_some_component():
    broken = {id(check.properties[check.subject.component.name]) for check in BROKEN}
    kinds = [Component(kind, "x", lambda: None, batch=True) for kind in KINDS]
    classes = [Component(kind, "x", type("X", (), {})) for kind in KINDS]
    every = {id(p): p for component in (*kinds, *classes) for p in properties(component)}
    assert [p.name for key, p in every.items() if key not in broken] == []
    assert all(p.demand.endswith(".") and p.remedy for p in every.values())


@rlsdk.field("lateness", sample=(0.0, 1.0))
def lateness(batch):
    """Where a token stands in its response."""
    return np.concatenate([np.arange(n) / n for n in batch.arrays.responses])


@rlsdk.advantage("late", needs=(lateness,))
def late(x):
    """Returns a list, and reads a field of its own."""
    return (x.per_token(x.rewards) * x.lateness).tolist()


def test_a_fault_of_a_component_with_a_field_of_its_own_shows_the_field():
    fault = failed(late)["shapes"]
    assert "lateness [" in fault.given
    assert fault.got == "a list"


@rlsdk.workflow("hasty")
async def hasty(task, chat):
    """Forgets to await the answer."""
    answer = chat.sample()  # noqa: F841
    return chat.finish()


@rlsdk.workflow("silent")
async def silent(task, chat):
    """Never asks the policy."""
    return chat.finish()


@rlsdk.workflow("blocking")
async def blocking(task, chat):
    """Blocks the event loop."""
    time.sleep(10)  # noqa: ASYNC251


@rlsdk.workflow("dozing")
async def dozing(task, chat):
    """Blocks the event loop for a while."""
    await chat.sample()
    time.sleep(0.8)  # noqa: ASYNC251
    return chat.finish()


@rlsdk.workflow("threaded")
async def threaded(task, chat):
    """Blocks a thread."""
    await chat.sample()
    await asyncio.to_thread(time.sleep, 0.8)
    return chat.finish()


@rlsdk.workflow("misspelt")
async def misspelt(task, chat):
    """Reads an attribute that no message has."""
    answer = await chat.sample()
    return chat.finish(metrics={"letters": len(answer.txt)})


@rlsdk.workflow("worded")
async def worded(task, chat):
    """Has a metric that is no number."""
    await chat.sample()
    return chat.finish(metrics={"tone": "warm"})


@rlsdk.workflow("picky")
async def picky(task, chat):
    """Runs on some tasks only."""
    await chat.sample()
    return chat.finish(metrics={"level": task.metadata["level"]})


@rlsdk.workflow("divided")
async def divided(task, chat):
    """Gives a reward that is not a number."""
    await chat.sample()
    chat.reward(float("nan"))
    return chat.finish()


@rlsdk.workflow("doubled")
async def doubled(task, chat):
    """Returns one rollout twice."""
    await chat.sample()
    return [chat.finish()] * 2


def test_mistakes_of_a_workflow_are_reported(monkeypatch):
    pytest.importorskip("transformers")
    assert failed(hasty)["gives-rollouts"].got == "coroutine 'TokenChat.sample' was never awaited"
    assert failed(silent)["gives-rollouts"].got == "one without a sampled token"
    (skipped,) = (f for f in check_component(picky) if f.outcome == "skipped")
    assert "KeyError: 'level' (" in skipped.reason
    assert "--task" in skipped.reason
    assert "'Message' object has no attribute 'txt' (" in failed(misspelt)["gives-rollouts"].got
    assert "the metric 'tone' is 'warm'" in failed(worded)["gives-rollouts"].got
    assert "a reward must be finite" in failed(divided)["gives-rollouts"].got
    assert "it returned the same Rollout twice" in failed(doubled)["gives-rollouts"].got
    fault = failed(dozing)["leaves-its-loop-free"]
    assert fault.expected == "an await at least every 0.5 s"
    assert re.search(rf"s without one, in dozing in {__file__}, line \d+ \(time.sleep\(0.8\)", fault.got)
    assert "asyncio.to_thread" in fault.remedy
    assert not failed(threaded)
    monkeypatch.setattr(environments, "WORKFLOW_SECONDS", 0.3)
    fault = failed(blocking)["ends"]
    assert fault.expected == "an answer within 0.3 s"
    assert "asyncio.to_thread" in fault.remedy


@rlsdk.workflow("leaving")
class Leaving:
    """Ends the process."""

    async def run(self, task, chat):
        raise SystemExit(3)


@rlsdk.filter("closed")
class Closed:
    """Ends the process when it is made."""

    def __init__(self) -> None:
        raise SystemExit(4)

    def __call__(self, group) -> bool:
        return True


def test_a_workflow_or_a_constructor_that_exits_is_reported():
    assert "'closed' cannot be created: SystemExit: 4 (" in failed(Closed)["defaults-valid"].got
    pytest.importorskip("transformers")
    assert failed(Leaving)["ends"].got.startswith("SystemExit: 3 (")


@rlsdk.environment("stuck")
class Stuck:
    """Never answers."""

    def reset(self, seed: int) -> Observation:
        return Observation("act")

    async def step(self, text: str) -> Step:
        time.sleep(60)  # noqa: ASYNC251 - the mistake
        return Step(Observation(""), 0.0, True)


def test_an_environment_whose_step_never_answers_is_reported(monkeypatch):
    monkeypatch.setattr(environments, "EPISODE_SECONDS", 0.2)
    found = failed(Stuck)
    assert list(found) == ["steps"]
    assert found["steps"].expected == "an answer within 0.2 s"


@rlsdk.filter("endless")
def endless(group) -> bool:
    """Never answers."""
    while True:
        time.sleep(0.01)


def test_any_call_that_never_ends_is_reported(monkeypatch):
    monkeypatch.setattr(subject, "CALL_SECONDS", 0.1)
    assert failed(endless)["keeps-a-part"].expected == "an answer within 0.1 s"


@rlsdk.tasks("hanging")
def hanging():
    """Waits for a server that never answers."""
    time.sleep(60)


@rlsdk.tasks("keyed")
class Keyed:
    """Raises KeyError in place of IndexError."""

    def __len__(self):
        return 1

    def __getitem__(self, i):
        return {0: rlsdk.Task("a", "1+1=")}[i]


def test_a_source_that_hangs_or_ends_with_another_error_is_reported(monkeypatch):
    monkeypatch.setattr(subject, "SOURCE_SECONDS", 0.1)
    assert failed(hanging)["sized-and-indexable"].expected == "an answer within 0.1 s"
    assert failed(Keyed)["sized-and-indexable"].got.startswith("KeyError: 1 (")


# --- what a message shows


@rlsdk.policy_loss("leaky")
def leaky(x, *, scale: float = 1.0):
    """Divides by the tokens of the micro-batch.

    Args:
        scale: Factor.
    """
    return -scale * x.advantages * x.logprobs / x.loss_mask.sum().clamp(min=1)


def test_the_input_is_small_and_can_be_read():
    fault = failed(leaky)["micro-batches"]
    lines = fault.given.splitlines()
    assert lines[0] == "reduced from: three pairs of rollouts"
    assert lines[1] == "LossInputs: 2 rollouts, 2 tokens, float32"
    assert re.fullmatch(
        r"rollout 0: logprobs \[-?[\d.]+\], old_logprobs \[-?[\d.]+\], advantages \[[\d.]+\], loss_mask \[1\], "
        r"behaviour_logprobs \[-?[\d.]+\]",
        lines[2],
    )
    assert len(lines) == 4
    assert "micro-batches: rollout [0], then the rest" in fault.expected
    assert "whole_batch=True" in fault.remedy


def test_the_input_shows_what_happens():
    """The numbers of the message, put into the component by hand, give the numbers of the message."""
    fault = failed(leaky)["micro-batches"]
    names = ("logprobs", "old_logprobs", "advantages")
    shown = {name: [float(v) for v in re.findall(rf"[:,] {name} \[(.*?)\]", fault.given)] for name in names}
    x = rlsdk.LossInputs(
        *(torch.tensor(shown[name]) for name in names),
        torch.ones(2).bool(),
        torch.tensor([0, 1]),
    )
    numbers = [float(v) for v in re.search(r"\[(.*?)\]", fault.expected)[1].split()]
    assert leaky(x).tolist() == pytest.approx(numbers, rel=1e-3)
    halved = [float(v) for v in re.search(r"\[(.*?)\]", fault.got)[1].split()]
    assert halved == pytest.approx([2 * v for v in numbers], rel=1e-3)


def test_a_pair_is_never_split():
    @rlsdk.policy_loss("pairwise", needs=("pairs", "preferred"))
    def pairwise(x):
        """Sums over pairs, and the number of rollouts."""
        gains = torch.zeros(len(x.pairs)).index_add(0, x.segments, torch.where(x.loss_mask, x.logprobs, 0))
        margin = gains.new_zeros(len(x.pairs)).index_add(0, x.pairs, torch.where(x.preferred, gains, -gains))
        return -margin[x.pairs][x.segments] * len(x.pairs)

    fault = failed(pairwise)["micro-batches"]
    assert "LossInputs: 4 rollouts" in fault.given
    assert "rollouts [0, 1], then the rest" in fault.expected


def test_a_loss_that_compares_the_rollouts_of_a_group_must_say_so():
    def ranked(x):
        """Each rollout's logprob relative to the mean of its group."""
        labels = x.groups if hasattr(x, "groups") else torch.zeros(x.rollouts, dtype=torch.int64)
        sums = torch.zeros(x.rollouts).index_add(0, x.segments, torch.where(x.loss_mask, x.logprobs, 0))
        means = [sums[labels == labels[row]].mean() for row in range(x.rollouts)]
        return (torch.stack([sums.sum() * 0, *means])[1:] - sums)[x.segments] * x.advantages

    fault = failed(rlsdk.policy_loss("hidden")(ranked))["micro-batches"]
    assert "needs=('groups',)" in fault.remedy
    declared = rlsdk.policy_loss("declared", needs=("groups",))(types.FunctionType(ranked.__code__, globals()))
    assert "micro-batches" not in failed(declared)


def test_what_a_component_raises_is_reported_with_its_place():
    @rlsdk.advantage("raises")
    def raises(x):
        """Raises."""
        return x.rewards / x.nothing

    fault = failed(raises)["shapes"]
    assert fault.got.startswith("AttributeError: 'CreditInputs' object has no attribute 'nothing'; a component that")
    assert "@rlsdk.field('nothing')" in fault.got
    assert "test_suite.py, line " in fault.got
    assert fault.expected == "a result"


def test_a_task_that_cannot_be_sent_to_scoring_processes_is_refused():
    @rlsdk.tasks("open_files")
    def open_files():
        """Keeps an open file."""
        with open(__file__) as file:
            return [rlsdk.Task(id="0", prompt="1+1=", metadata={"file": file})]

    fault = failed(open_files)["sized-and-indexable"]
    assert fault.expected == "a task at 0 that can be sent to scoring processes"
    assert re.search("cannot pickle '.*TextIOWrapper'", fault.got)


def test_what_a_weight_transfer_raises_is_reported_with_its_place():
    @rlsdk.weight_transfer("seatless")
    class Seatless:
        """Its `receive` lacks an argument."""

        def offer(self, parts, engines, host):
            """Offer nothing."""

        def send(self, parts):
            """Send nothing."""

        def receive(self, offer):
            """Receive nothing."""

    fault = failed(Seatless)["carries-all-bits"]
    assert "receive() takes 2 positional arguments but 3 were given" in fault.got


def test_the_page_shows_what_the_suite_says(capsys):
    page = (Path(__file__).parents[2] / "docs" / "howto" / "conformance.md").read_text()
    blocks = {
        name: re.findall(rf"^```{name}\n(.*?)^```", page, re.DOTALL | re.MULTILINE) for name in ("python", "text")
    }
    exec(compile("\n".join(blocks["python"]), "conformance.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == blocks["text"][0]


def test_every_property_is_explained_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "howto" / "conformance.md").read_text()
    assert [name for check in BROKEN for name in check.properties if f"`{name}`" not in page] == []


def test_faults_travel():
    fault = failed(leaky)["micro-batches"]
    again = pickle.loads(pickle.dumps(fault))
    assert (str(again), again.broken, again.given) == (str(fault), fault.broken, fault.given)


def test_a_tensor_that_cannot_be_read_is_a_fault_in_words():
    @rlsdk.advantage("sparse")
    def sparse(x):
        """Sparse rewards."""
        return x.rewards.to_sparse()

    @rlsdk.advantage("elsewhere")
    def elsewhere(x):
        """Rewards on another device."""
        return x.rewards.to("meta")

    assert failed(sparse)["shapes"].got.startswith("a sparse tensor [")
    assert failed(elsewhere)["shapes"].got.endswith("of float32 on meta, not on the inputs' cpu")


def test_an_option_that_a_configuration_reads_as_its_own_key_is_a_fault():
    @rlsdk.reward("weighty")
    def weighty(rollout, *, weight: float = 1.0) -> float:
        """Its `weight`."""
        return weight

    assert failed(weighty)["contract"].got == "weight"
    assert "gate, metric, multiply, range, sources, use, weight" in failed(weighty)["contract"].expected


def test_numbers_and_bools_of_numpy_are_as_good():
    @rlsdk.buffer("newest")
    def newest(group, *, step, uses):
        """The newest first."""
        return np.float32(step)

    @rlsdk.stop("half")
    def half(*, available, target):
        """Half of the groups."""
        return np.bool_(available * 2 >= target)

    assert not {"gives-a-priority"} & failed(newest).keys()
    assert not {"answers-yes-or-no", "more-is-enough"} & failed(half).keys()


# --- what is skipped, and why


@rlsdk.reward("needy")
def needy(rollout, *, path: str, size: int) -> float:
    """Needs options.

    Args:
        path: A file.
        size: A number.
    """
    return float(size)


def test_what_cannot_be_made_is_skipped_with_what_it_needs():
    found = {f.rule: f for f in check_component(needy)}
    assert found["contract"].outcome == found["options-documented"].outcome == "passed"
    assert found["scores"].outcome == found["any-text"].outcome == "skipped"
    assert found["scores"].reason == (
        "needs options path (str), size (int): --option needy.path=VALUE --option needy.size=VALUE"
    )
    assert {f.outcome for f in check_component(needy, {"path": "x", "size": 3})} == {"passed"}


def test_options_that_do_not_fit_are_not_the_components_fault():
    with pytest.raises(OptionError, match="expected float"):
        check_component(leaky, {"scale": "much"})


def test_what_is_not_marked_is_refused():
    with pytest.raises(UnknownComponentError, match="is not marked"):
        check_component(len)


def test_what_hangs_on_another_property_is_skipped():
    @rlsdk.advantage("scalar")
    def scalar(x):
        """A mean."""
        return x.rewards.mean()

    found = {f.rule: f for f in check_component(scalar)}
    assert (found["permutation"].outcome, found["permutation"].reason) == ("skipped", "shapes does not hold")


def test_random_choices_are_not_an_order_fault():
    @rlsdk.policy_loss("dropout")
    def dropout(x):
        """Leaves out half of the optimiser batch."""
        kept = torch.rand(len(x.whole.logprobs), generator=x.generator) < 0.5
        return -x.advantages * x.logprobs * kept[x.offset : x.offset + len(x.logprobs)]

    component = rlsdk.components.component_of(dropout)
    found = {f.rule: f for f in check_component(Component("policy_loss", "dropout", component.obj, whole_batch=True))}
    assert found["permutation"].outcome == "skipped"
    assert "random numbers" in found["permutation"].reason
    assert found["micro-batches"].outcome == found["deterministic"].outcome == "passed"


def test_what_stands_at_tokens_that_are_not_trained_is_no_random_choice():
    @rlsdk.policy_loss("gapped")
    def gapped(x: rlsdk.LossInputs):
        """Undefined where nothing was sampled."""
        return torch.where(x.loss_mask, -x.advantages * x.logprobs, float("nan"))

    assert {f.rule: f for f in check_component(gapped)}["permutation"].outcome == "passed"


def test_a_loss_that_reads_the_whole_must_say_so():
    @rlsdk.policy_loss("centred")
    def centred(x):
        """Advantages over the mean of the optimiser batch."""
        held = x.whole
        mean = torch.where(held.loss_mask, held.advantages, 0).sum() / held.loss_mask.sum().clamp(min=1)
        return -(x.advantages - mean) * x.logprobs

    assert "micro-batches" in failed(centred)
    assert "micro-batches" not in failed(Component("policy_loss", "centred", centred, whole_batch=True))


# --- rewards


@pytest.mark.parametrize(("batch", "breaks"), [(True, True), ("group", False)])
def test_a_comparing_reward_that_takes_any_list_is_referred_to_groups(batch, breaks):
    @rlsdk.reward("rank", batch=batch)
    def rank(rollouts):
        """From 0 for the longest answer to 1 for the shortest."""
        order = sorted(range(len(rollouts)), key=lambda i: -len(rollouts[i].text))
        return [order.index(i) / max(len(rollouts) - 1, 1) for i in range(len(rollouts))]

    found = failed(rank)
    assert ("batch-splits" in found) == breaks
    if breaks:
        assert 'a reward that compares rollouts needs batch="group"' in str(found["batch-splits"])


def test_a_reward_that_raises_is_shown_with_its_line():
    @rlsdk.reward("raises")
    def raises(rollout):
        """Reads a missing field."""
        return {}["x"]

    line = raises.__code__.co_firstlineno + 3
    assert failed(raises)["scores"].got.endswith(f"KeyError: 'x' ({shown(__file__)}, line {line})")


def shown(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def test_a_reward_that_hangs_is_ended():
    @rlsdk.reward("slow")
    def slow(rollout):
        """Sleeps over some answers."""
        try:
            while "computes forever" in rollout.text or "9**9" in rollout.text:
                pass
        except Exception:
            return 0.0
        return 1.0

    from rlsdk.testing.properties import scoring

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "SECONDS", 0.2)
        begun = time.process_time()
        fault = failed(slow)["any-text"]
    assert time.process_time() - begun < 5
    assert (fault.expected, fault.got) == ("an answer within 0.2 s", "none")
    assert "an answer that computes forever" in fault.given


def test_a_limit_leaves_another_alarm_as_it_was():
    import signal

    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Violated, match=r"within 0\.05 s"), time_limit(0.05):
            while True:
                pass
        assert not rung
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] < 0.3
        while not rung:
            pass
        assert rung == [1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_enclosing_limit_that_ends_sooner_is_the_one_reported():
    with pytest.raises(Violated, match=r"within 0\.05 s"), time_limit(0.05), time_limit(60):
        while True:
            pass


def test_a_megabyte_is_not_printed():
    @rlsdk.reward("long")
    def long(rollout):
        """Refuses long ones."""
        if len(rollout.text) > 1000:
            raise ValueError
        return 1.0

    fault = failed(long)["any-text"]
    assert fault.given == "a megabyte of one letter\ntask with answer '42', response 'a' × 1,000,000"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_that_refuses_tasks_is_given_one(is_async):
    def grade(rollout):
        if "tests" not in rollout.task.metadata:
            raise rlsdk.errors.DataError("the task has no tests")
        return 1.0

    if is_async:

        @rlsdk.reward("tested")
        async def tested(rollout):
            """Runs the task's tests."""
            return grade(rollout)
    else:

        @rlsdk.reward("tested")
        def tested(rollout):
            """Runs the task's tests."""
            return grade(rollout)

    from rlsdk.testing.conformance import Check
    from rlsdk.testing.subject import Subject

    component = rlsdk.components.component_of(tested)
    refused = Check(Subject(component)).finding("scores")
    assert refused.outcome == "skipped"
    assert "no sample task suits it (DataError: the task has no tests" in refused.reason and "--task" in refused.reason
    task = rlsdk.Task("t", "?", metadata={"tests": "assert True"})
    assert Check(Subject(component, tasks=(task,))).finding("any-text").outcome == "passed"


def test_a_reward_without_a_valid_score_does_not_pass():
    @rlsdk.reward("silent")
    def silent(rollout):
        """Scores nothing."""
        return rlsdk.Score.invalid("it returned '1.0'; expected a number")

    from rlsdk.testing.conformance import Check
    from rlsdk.testing.subject import Subject

    component = rlsdk.components.component_of(silent)
    unscored = Check(Subject(component)).finding("scores")
    assert unscored.outcome == "skipped" and "(it returned '1.0'; expected a number)" in unscored.reason
    task = rlsdk.Task("t", "?", answer="1")  # the user's own: one of the answers should have a score
    assert Check(Subject(component, tasks=(task,))).finding("scores").outcome == "failed"


# --- contracts


def test_signatures_are_read():
    @rlsdk.workflow("sync")
    class Sync:
        """Not async."""

        def run(self, task, chat):
            """Run."""

    @rlsdk.engine("half")
    class Half:
        """Has little of an engine."""

        def environment(self, place):
            """None."""

    @rlsdk.tracker("waiting")
    class Waiting:
        """Nobody awaits its `log`."""

        def open(self, run):
            """Do nothing."""

        async def log(self, step, metrics):
            """Do nothing."""

        def close(self):
            """Do nothing."""

    assert failed(Waiting)["contract"].expected == "a method log(self, step, metrics), which is called without await"
    assert failed(Sync)["contract"].got == "one that is not async"
    assert failed(Half)["contract"].expected.startswith("a method start(self, model")


def test_all_missing_methods_are_named_at_once():
    @rlsdk.tracker("half")
    class Half:
        """Only logs."""

        def log(self, step, metrics):
            """Do nothing."""

    fault = failed(Half)["contract"]
    assert fault.expected == "a method open(self, run) and a method close(self)"
    assert fault.got == "none of these"


def test_an_environment_of_gymnasium_is_answered_with_how_it_is_played():
    gymnasium = pytest.importorskip("gymnasium")

    @rlsdk.environment("box")
    class Box(gymnasium.Env):
        """Moves along a line."""

        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            """Begin."""

        def step(self, action):
            """Move."""

    fault = failed(Box)["contract"]
    assert fault.expected == "Box.reset to be callable as (self, seed)"
    assert "{use: gymnasium, id: 'MODULE:NAME-v0'}" in fault.got


def test_a_report_counts():
    report = check_plugin(PLUGINS[LAB], "broken_lab", kind="kl")
    assert not report.conforms
    assert {name for _, name in report.by_component()} == {
        "broken_lab/gradient-only-through-logprobs",
        "broken_lab/zero-where-equal",
        "broken_lab/positive-on-average",
    }
    assert report.counts()["failed"] == 3
    described = report.describe()
    assert described["findings"][0]["component"].startswith("broken_lab/")
    assert any(finding.get("got") for finding in described["findings"])


@rlsdk.advantage("asked")
async def asked(x: rlsdk.CreditInputs) -> torch.Tensor:
    """Group mean as baseline, given by an async function."""
    return x.rewards - x.group_mean(x.rewards)


@rlsdk.shaping("undefined")
async def undefined(x: rlsdk.CreditInputs) -> torch.Tensor:
    """Not a number, given by an async function."""
    return x.rewards * float("nan")


class _Client:
    """A connection that, like those of HTTP clients, can be used only in the event loop in which it was opened."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None

    async def ask(self) -> None:
        self.loop = self.loop or asyncio.get_running_loop()
        if self.loop is not asyncio.get_running_loop():
            raise RuntimeError("the client belongs to another event loop")
        await asyncio.sleep(0)


SHARED = _Client()


@rlsdk.reward("referee")
class Referee:
    """1.0 for every answer, by a client that stays open."""

    def __init__(self) -> None:
        self.client = _Client()

    async def __call__(self, rollout: rlsdk.Rollout) -> float:
        await self.client.ask()
        await SHARED.ask()
        return 1.0


@rlsdk.environment("browser")
class Browser:
    """An empty page, by a client that stays open."""

    def __init__(self) -> None:
        self.client = _Client()

    async def reset(self, seed: int) -> Observation:
        await self.client.ask()
        return Observation("")

    async def step(self, text: str) -> Step:
        await self.client.ask()
        return Step(Observation(""))


@pytest.mark.parametrize("component", [Referee, Browser])
def test_async_code_keeps_a_client_across_calls(component) -> None:
    assert failed(component) == {}


def test_an_async_advantage_is_awaited_and_held_to_the_same_properties() -> None:
    assert len(check_component(asked)) > 10 and not failed(asked)
    assert "expected: finite rewards" in str(failed(undefined)["shapes"])


# --- mistakes of a trainer for GRPO, as plugins


def one_late(x):
    """The mask of the tokens, shifted by one."""
    mask = torch.cat([x.loss_mask.new_zeros(1), x.loss_mask[:-1]])
    return torch.where(mask, -x.advantages * (x.logprobs - x.old_logprobs).exp(), 0.0 * x.logprobs)


def over_padding(x):
    """Divided by the length to which the batch is padded."""
    return x.to_padded(-x.advantages * (x.logprobs - x.old_logprobs).exp()).sum(1)[x.segments] / x.segments.numel()


def over_batch(x):
    """Averaged over the tokens of the micro-batch, which the core does over all."""
    return -x.advantages * (x.logprobs - x.old_logprobs).exp() / x.loss_mask.sum().clamp(min=1)


def wrong_sign(x):
    """The objective itself, which grows."""
    return x.advantages * (x.logprobs - x.old_logprobs).exp()


def backwards(logprobs, ref_logprobs):
    """The k3 estimator, of the other direction's sign."""
    return ref_logprobs - logprobs


def across_groups(x):
    """The deviation over groups, where the one over a group's members is meant."""
    table = x.outcomes.view(-1, 3) if len(x.outcomes) % 3 == 0 else x.outcomes[None]
    spread = (table - table.mean(0, keepdim=True)).square().mean(0, keepdim=True).sqrt()
    return ((table - table.mean(1, keepdim=True)) / (spread + 1e-6)).reshape(-1)


@pytest.mark.parametrize(
    ("mark", "function", "rule", "words"),
    [
        (rlsdk.policy_loss, one_late, "permutation", "use x.groups or x.segments to tell rollouts apart"),
        (rlsdk.policy_loss, over_padding, "micro-batches", "as unsplit"),
        (rlsdk.policy_loss, over_batch, "micro-batches", "let a token's value depend only on its own rollout"),
        (rlsdk.policy_loss, wrong_sign, "follows-the-advantage", "a loss is minimised: return -x.advantages"),
        (rlsdk.kl, backwards, "positive-on-average", "drives the policy away from the reference"),
        (rlsdk.advantage, across_groups, "permutation", "never their position in the batch"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_that_trains_on_is_caught_in_words(mark, function, rule, words):
    faults = failed(mark(function.__name__)(function))
    assert rule in faults
    assert words in " ".join(str(faults[rule]).split())
