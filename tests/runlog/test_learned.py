"""The learner's values for the tokens of a stored group, and evaluation answers in the same store."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np

from rlsdk.runlog.metrics import note_ledger, read_ledger
from rlsdk.runlog.query import query
from rlsdk.runlog.serialization import decode, decode_learned, encode
from rlsdk.runlog.store import Address, RolloutStore
from rlsdk.runlog.tables import Entry, evaluated_entries

Make = Callable[..., Entry]


def test_arrays_of_the_learner_come_back_for_trained_rollouts_alone(entry: Make) -> None:
    group = entry(3).group
    values = np.linspace(-1, 1, 5, dtype=np.float32)
    payload = encode(group, {"advantages": [values, None], "entropy": [None, values * 2]})
    found = decode_learned(payload)
    assert found["advantages"][1] is None and found["entropy"][0] is None
    np.testing.assert_array_equal(found["advantages"][0], values)
    np.testing.assert_array_equal(found["entropy"][1], values * 2)
    back = decode(payload)
    assert back.uid == group.uid
    np.testing.assert_array_equal(back.rollouts[1].logprobs, group.rollouts[1].logprobs)


def test_arrays_of_the_learner_stand_behind_those_of_routing(entry: Make) -> None:
    group = entry(3).group
    routed = attrs.evolve(group.rollouts[1], routed_experts=np.arange(20).reshape(5, 2, 2))
    group = attrs.evolve(group, rollouts=[group.rollouts[0], routed])
    values = np.ones(5, np.float32)
    payload = encode(group, {"advantages": [values, values]})
    np.testing.assert_array_equal(decode_learned(payload)["advantages"][1], values)
    experts = decode(payload).rollouts[1].routed_experts
    assert experts is not None and experts[4, 1, 1] == 19


def test_a_group_without_them_is_written_as_an_earlier_rlsdk_reads_it(entry: Make) -> None:
    raw = zlib.decompress(encode(entry(1).group, {}))
    told = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert told["format"] == 4
    assert "learned" not in told
    assert decode_learned(encode(entry(1).group)) == {}


def test_answers_of_evaluations_are_stored_apart(address: Address, entry: Make, tmp_path: Path) -> None:
    store = RolloutStore(address)
    answers = [entry(n).group for n in (7, 8)]
    with store.transaction():
        store.put([entry(0), entry(1)])
        for step in (0, 5):
            store.put(evaluated_entries(step, {"eval greedy": answers, "eval sampled": answers}))
    assert {row["number"] for row in query(tmp_path)} == {0, 1}
    kept = query(tmp_path, evaluations=True)
    assert [(row["step"], row["state"], row["task"]) for row in kept[::2]] == [
        (step, state, f"t{n}") for step in (0, 5) for state in ("eval greedy", "eval sampled") for n in (7, 8)
    ]
    store.rewind(3, {})  # a run that is resumed before the second evaluation
    assert {row["step"] for row in query(tmp_path, evaluations=True)} == {0}
    store.close()


def test_the_ledger_of_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    for step in (1, 2, 3, 2, 3):
        note_ledger(tmp_path, step, {"sums": {"trained": 10 * step}})
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"step": 4, "sour')
    assert [row["step"] for row in read_ledger(tmp_path)] == [1, 2, 3]
    note_ledger(tmp_path, 4, {})  # not glued to the line that was cut off
    assert [row["step"] for row in read_ledger(tmp_path)] == [1, 2, 3, 4]
    assert [row["step"] for row in read_ledger(tmp_path, most=3)] == [2, 4]
    assert read_ledger(tmp_path / "none") == []
    assert json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[0])["sources"] == {"sums": {"trained": 10}}


def test_the_ledger_on_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    note_ledger(tmp_path / "missing", 1, {})
    assert not (tmp_path / "missing").exists()
