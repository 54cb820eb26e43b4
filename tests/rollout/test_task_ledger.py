"""Every issued task ends once, and the counts add up, for any sequence of events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rlsdk.config.rollout import RolloutSection
from rlsdk.contracts.rollouts import TaskStatus
from rlsdk.errors import RunError
from rlsdk.rollout.staleness import StalenessPolicy, is_trainable, staleness
from rlsdk.rollout.task_ledger import ENDS, LEGAL, TaskLedger
from rlsdk.types import Group, Rollout, Score, Task

SOURCES = ("a", "b")
TASK = Task(id="t", prompt="x")
GROUP = Group(TASK, (), ())


class LedgerUse(RuleBasedStateMachine):
    """A generator and a trainer that do anything that is legal."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = TaskLedger(SOURCES)
        self.issued = dict.fromkeys(SOURCES, 0)
        self.ended: dict[str, list[int]] = {name: [] for name in SOURCES}
        self.targets = dict.fromkeys(SOURCES, 0)
        self.in_hand = dict.fromkeys(SOURCES, 0)

    @rule(source=st.sampled_from(SOURCES), groups=st.integers(0, 30))
    def asked(self, source: str, groups: int) -> None:
        self.ledger.ask(source, groups)
        assert self.ledger.counts(source).target >= self.targets[source]  # it never falls
        self.targets[source] = self.ledger.counts(source).target

    @rule(source=st.sampled_from(SOURCES), oversample=st.sampled_from([0.0, 0.5, 2.0]))
    def filled(self, source: str, oversample: float) -> None:
        before = self.ledger.counts(source).scheduled
        for _ in range(self.ledger.wanted(source, 4, oversample)):
            self.ledger.move(self.ledger.issue(source, TASK), TaskStatus.RUNNING)
            self.issued[source] += 1
        assert self.ledger.wanted(source, 4, oversample) == 0  # asking again adds nothing
        counts = self.ledger.counts(source)
        reserve = int(np.ceil(4 * oversample)) if counts.gap else 0
        # What was scheduled under a larger reserve stays; nothing is added to it.
        assert counts.scheduled == max(counts.gap + reserve, before)

    @rule(data=st.data())
    def moved(self, data: st.DataObject) -> None:
        live = [t for source in SOURCES for t in self.ledger.records(source, *TaskStatus)]
        if not live:
            return
        record = data.draw(st.sampled_from(live))
        to = data.draw(st.sampled_from(sorted(TaskStatus)))
        before = {source: self.ledger.counts(source) for source in SOURCES}
        if to not in LEGAL[record.state] or (record.taken and to is TaskStatus.EXPIRED):
            with pytest.raises(RunError, match="cannot become"):
                self.ledger.move(record, to)
            assert {source: self.ledger.counts(source) for source in SOURCES} == before
            return
        was, taken = record.state, record.taken
        self.ledger.move(record, to, GROUP if to is TaskStatus.COMPLETED else None)
        gap, after = before[record.source].gap, self.ledger.counts(record.source).gap
        if taken:
            assert after == gap  # what was taken never opens the gap again, whatever becomes of it
        elif was is TaskStatus.COMPLETED:
            assert after >= gap  # what expires or is left out is wanted anew
        if to in ENDS:
            self.in_hand[record.source] -= taken
            self.ended[record.source].append(record.number)
            with pytest.raises(RunError):
                self.ledger.move(record, TaskStatus.RUNNING)

    @rule(data=st.data())
    def taken(self, data: st.DataObject) -> None:
        there = [t for source in SOURCES for t in self.ledger.records(source, TaskStatus.COMPLETED)]
        if not there:
            return
        record = data.draw(st.sampled_from(there))
        before = self.ledger.counts(record.source)
        if record.taken:
            with pytest.raises(RunError, match="no group to take"):
                self.ledger.take(record)
            return
        assert self.ledger.take(record) is GROUP
        after = self.ledger.counts(record.source)
        assert after.gap == before.gap
        assert (after.consumed, after.available) == (before.consumed + 1, before.available - 1)
        self.in_hand[record.source] += 1

    @rule()
    def saved(self) -> None:
        fresh = TaskLedger(SOURCES)
        fresh.restore(self.ledger.state())
        for source in SOURCES:
            before, after = self.ledger.counts(source), fresh.counts(source)
            kept = ("target", "trained", "filtered", "failed", "expired")
            assert [getattr(after, name) for name in kept] == [getattr(before, name) for name in kept]
            assert after.consumed == before.consumed - self.in_hand[source]  # what is not settled is taken again
            assert (after.available, after.scheduled, after.waiting) == (0, 0, 0)

    @invariant()
    def it_adds_up(self) -> None:
        for source in SOURCES:
            counts = self.ledger.counts(source)
            live = counts.available + counts.scheduled + counts.waiting + self.in_hand[source]
            ended = counts.trained + counts.filtered + counts.failed
            assert live + ended == self.issued[source]
            assert len(set(self.ended[source])) == len(self.ended[source]) == ended


LedgerUse.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestLedgerUse = LedgerUse.TestCase


def test_a_source_that_is_not_there_is_an_error() -> None:
    ledger = TaskLedger(["a"])
    with pytest.raises(KeyError):
        ledger.counts("b")
    with pytest.raises(KeyError):
        ledger.issue("b", TASK)


def test_the_reserve_is_a_share_of_the_batch_not_of_what_is_missing() -> None:
    ledger = TaskLedger(["a"])
    ledger.ask("a", 8)
    assert ledger.wanted("a", 8, 0.25) == 10
    records = [ledger.issue("a", TASK) for _ in range(10)]
    for record in records:
        ledger.move(record, TaskStatus.RUNNING)
    for record in records[:7]:
        ledger.move(record, TaskStatus.COMPLETED, GROUP)
    assert ledger.counts("a").gap == 1
    assert ledger.wanted("a", 8, 0.25) == 0  # three run: one that is missing, and the reserve of two


def test_those_that_wait_come_in_the_order_asked_for() -> None:
    ledger = TaskLedger(["a"])
    first, second, third = (ledger.issue("a", TASK) for _ in range(3))
    for record in (first, second, third):
        ledger.move(record, TaskStatus.RUNNING)
    ledger.move(first, TaskStatus.ABORTED)
    ledger.move(second, TaskStatus.COMPLETED, GROUP)
    ledger.move(second, TaskStatus.EXPIRED)
    ledger.move(third, TaskStatus.ABORTED)
    assert ledger.records("a", TaskStatus.EXPIRED, TaskStatus.ABORTED) == [second, first, third]


def sampled(versions: list[int]) -> Rollout:
    mask = [v >= 0 for v in versions]
    return Rollout(TASK, (), [1] * len(versions), mask, [0.0] * len(versions), versions)


def test_a_group_is_as_old_as_its_oldest_trained_token() -> None:
    group = Group(TASK, (sampled([-1, 5, 4]), sampled([-1, 6])), (Score(0), Score(0)))
    assert staleness(group, 6) == 2
    assert staleness(Group(TASK, (sampled([-1]),), (Score(0),)), 6) == 0
    demonstration = Rollout(TASK, (), [1, 2], [False, True], [0.0, 0.0], [-1, -1])
    assert staleness(Group(TASK, (demonstration,), (Score(0),)), 6) == 0  # trained on, but sampled by nobody
    sections = [RolloutSection(max_staleness=m, sync_interval=n) for m, n in ((0, 1), (1, 1), (0, 2), (4, 3))]
    assert [StalenessPolicy.of(section).limit for section in sections] == [1, 2, 2, 15]


def test_old_tokens_are_masked_one_by_one() -> None:
    demonstration = Rollout(TASK, (), [1, 2], [False, True], [0.0, 0.0], [-1, -1])
    group = Group(TASK, (sampled([-1, 3, 5, 6]), demonstration), (Score(0), Score(0)))
    young = StalenessPolicy(token_limit=2).trimmed(group, 6).rollouts
    assert [rollout.loss_mask.tolist() for rollout in young] == [[False, False, True, True], [False, True]]


def test_what_is_masked_makes_a_group_no_older_and_what_is_young_stays_as_it_is() -> None:
    group = Group(TASK, (sampled([-1, 2, 5]), sampled([-1, 6])), (Score(0), Score(0)))
    assert StalenessPolicy().trimmed(group, 6) is group
    assert StalenessPolicy(token_limit=5).trimmed(group, 6) is group
    young = StalenessPolicy(token_limit=4).trimmed(group, 6)
    assert young.rollouts[0].loss_mask.tolist() == [False, False, True]
    assert young.rollouts[0].policy_versions.tolist() == [-1, 2, 5]  # who sampled it is still known
    assert staleness(young, 6) == 1
    assert is_trainable(young)
    assert not is_trainable(StalenessPolicy(token_limit=2).trimmed(group, 9))
