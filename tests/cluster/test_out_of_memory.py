"""Ray's report of a process killed for its memory, reduced to one sentence."""

from __future__ import annotations

from rlsdk.cluster.actors import out_of_memory, reason

SCREENFUL = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.7, \
ID: 1f2e) was 22.61GB used / 23.54GB limit (0.960493)
OOM kill reason: the node is above its threshold
Object store memory usage: [1.9GB]
Ray killed 1 worker(s) based on the killing policy
Considered workers: [
(Actor: LearnerActor, pid=4711, actual memory used=15.02GB, worker ID=03)
]
To see more information about memory usage on this node, use `ray logs raylet.out -ip 10.0.0.7`
Top 10 memory users: ..."""


def test_it_says_who_how_much_and_what_to_lower():
    said = reason(RuntimeError(SCREENFUL))
    assert said.startswith("Ray killed it, since the memory of node 10.0.0.7 ran out (22.61GB of 23.54GB were in use")
    assert "it used 15.02GB" in said
    assert "learner.micro_batch_tokens" in said
    assert "\n" not in said


def test_other_deaths_are_left_alone():
    assert out_of_memory("The actor died because its process was killed by a signal") == ""
