"""Scores: the dataset's own, from what a task holds; hostile answers are answers, never code."""

from __future__ import annotations

import json
import time

import attrs
import pytest
from rlsdk_reasoning_gym import datasets as gym
from rlsdk_reasoning_gym.answers import EVALUATED, refused
from rlsdk_reasoning_gym.score import last_tag, score
from rlsdk_reasoning_gym.tasks import tasks as source

import rlsdk
from rlsdk.errors import DataError
from rlsdk.testing import HOSTILE
from rlsdk.types import Rollout, Task

SMALLER = {
    "knight_swap": {"min_nodes": 6, "max_nodes": 6},
    "zebra_puzzles": {"num_people": 3, "num_characteristics": 3},
}
"""Datasets that think long about their own questions."""


def load(name, size=2, **options):
    return rlsdk.load("tasks", source, datasets=name, size=size, config=SMALLER.get(name, {}), **options)()


def answered(task, text, **options):
    return rlsdk.load("reward", score, **options)(Rollout.from_text(task, text))


@pytest.fixture(autouse=True)
def _hashes(monkeypatch):
    """Allow datasets that draw from sets, since no other process creates their tasks again here."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.fixture
def chain():
    return load("chain_sum")[0]


def test_right_wrong_and_no_answer(chain):
    right = answered(chain, f"<think>…</think> <answer> {chain.answer} </answer>")
    assert (right.value, dict(right.metrics), right.reason) == (1.0, {"correct": 1.0, "answered": 1.0}, "")
    wrong = answered(chain, "<answer>no</answer>")
    assert (wrong.value, wrong.valid, dict(wrong.metrics)) == (0.0, True, {"correct": 0.0, "answered": 1.0})
    none = answered(chain, str(chain.answer))
    assert (none.value, none.metrics["answered"], none.reason) == (0.0, 0.0, "there is no <answer> … </answer>")


def test_the_tag_and_partial_credit_are_options(chain):
    assert answered(chain, f"<final>{chain.answer}</final>", tag="final").value == 1.0
    assert answered(chain, str(chain.answer), tag=None).value == 1.0
    padded = f"<answer>{chain.answer} or so</answer>"
    assert 0 < answered(chain, padded).value < 1
    assert answered(chain, padded, partial=False).value == 0.0
    assert answered(chain, f"<answer>{chain.answer}</answer>", partial=False).value == 1.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<answer>1</answer> <answer>2</answer>", "2"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<answer><answer>3</answer>", "3"),
        ("</answer><answer>", None),
        ("<answer></answer>", ""),
        ("<answer>\n4 5\n</answer>", "4 5"),
    ],
)
def test_the_last_closed_tag_counts(text, found):
    assert last_tag(text, "answer") == found


def test_where_several_answers_are_right_the_scorer_decides():
    task = load("puzzle24", 1)[0]
    assert answered(task, f"<answer>0 + {task.answer}</answer>").value < 1  # five numbers
    assert answered(task, f"<answer>( {task.answer} )</answer>").value == 1.0


def test_a_task_of_another_source_is_a_fault_of_the_data():
    with pytest.raises(DataError, match=r"task 'x': reasoning_gym/score needs the metadata .* it has: level"):
        answered(Task("x", "1+1?", "2", {"level": 1}), "<answer>2</answer>")
    with pytest.raises(DataError, match="task 'x': unknown dataset 'chain_sun'"):
        answered(Task("x", "?", "2", {"dataset": "chain_sun", "made": {"exact": True}}), "<answer>2</answer>")


def test_a_task_that_is_made_again_must_be_the_same():
    task = load("rearc", 1)[0]
    assert not task.metadata["made"]["exact"]
    assert answered(task, f"<answer>{task.answer}</answer>").value == 1.0
    with pytest.raises(DataError, match="this version of reasoning-gym creates a different task"):
        answered(attrs.evolve(task, answer="0 0"), "<answer>0 0</answer>")


def test_a_scorer_that_raises_on_a_wrong_answer_is_not_broken():
    task = load("prime_factorization", 1)[0]  # its scorer reads numbers with int()
    wrong = answered(task, "<answer>two times three</answer>")
    assert (wrong.value, wrong.valid) == (0.0, True)
    assert wrong.reason.startswith(
        "the scorer could not read the answer: prime_factorization: ValueError: invalid literal"
    )
    assert answered(task, f"<answer>{task.answer}</answer>").value == 1.0


def test_a_scorer_that_cannot_score_its_own_answer_is_broken():
    task = load("prime_factorization", 1)[0]
    broken = attrs.evolve(task, metadata={**task.metadata, "metadata": {}}, answer="2 x")
    scored = answered(broken, "<answer>two</answer>")
    assert (scored.valid, "the scorer failed: prime_factorization: " in scored.reason) == (False, True)


# --- hostile answers

CODE = [
    "__import__('pathlib').Path('MARK').touch()",
    "[__import__('pathlib').Path('MARK').touch()]",
    "open('MARK', 'w')",
    "[x for x in [open('MARK', 'w')]]",
    "(lambda: open('MARK', 'w'))()",
    "[*map(open, ['MARK'], ['w'])]",
    'eval(chr(111)+chr(112)+chr(101)+chr(110)+\'("MARK","w")\')',
    "exec(bytes([111]))",
    'f\'{open("MARK", "w")}\'',
    "[open('MARK', 'w')][0]",
    "print(1) or open('MARK', 'w')",
    "sin(open('MARK', 'w'))",
    'S(\'open("MARK", "w")\')',
    "Symbol('x').__class__",
    "ｏｐｅｎ('MARK', 'w')",
    "1 if open('MARK', 'w') else 2",
]


@pytest.mark.parametrize("name", sorted(set(EVALUATED) - {"coin_flip"}))
@pytest.mark.parametrize("code", CODE)
def test_code_is_never_run(name, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = load(name, 1)[0]
    scored = answered(task, f"<answer>{code}</answer>")
    assert (scored.valid, scored.value < 0.1) == (True, True)
    assert list(tmp_path.iterdir()) == []


def test_without_the_check_it_would_have_been(tmp_path, monkeypatch):
    """The library really evaluates: what the check keeps from happening does happen without it."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(sorted(set(EVALUATED) - {"coin_flip"})):
        data = gym.dataset(gym.Spec(name))
        data.score_answer(f"[open('{number}', 'w').close()]", data[0])
    assert len(list(tmp_path.iterdir())) == len(EVALUATED) - 1


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("countdown", "9**9**9**9"),
        ("countdown", "(9**99)**99**99"),
        ("countdown", "9**(99**99)"),
        ("countdown", "9**(99*99*99*99)"),
        ("countdown", "10000000!"),
        ("countdown", "factorial(10000000)"),
        ("puzzle24", "1e999999999"),
        ("polynomial_multiplication", "(x+1)**100000000"),
        ("polynomial_multiplication", "expand((x+y+z)**1000)"),
        ("simple_integration", "Sum(x, (x, 1, 10**10))"),
        ("simple_integration", "sin(" * 500 + "x" + ")" * 500),
        ("spiral_matrix", "[9]*9999999999"),
        ("n_queens", "'a'*9999999999"),
        ("coin_flip", "1e999999999"),
        ("binary_matrix", "[" * 5000),
        ("binary_matrix", "-" * 2000 + "1"),
    ],
)
def test_bombs_end_at_once(name, answer):
    begun = time.monotonic()
    scored = answered(load(name, 1)[0], f"<answer>{answer}</answer>")
    assert (scored.valid, scored.value < 0.1) == (True, True)
    assert time.monotonic() - begun < 5


def test_what_may_be_evaluated_is_evaluated():
    for name, wrapped in [("spiral_matrix", "[{}]"), ("string_insertion", "{}")]:
        task = load(name, 1)[0]
        items = task.answer.split() if name == "spiral_matrix" else list(task.answer)
        text = ", ".join(items) if name == "spiral_matrix" else str(items)
        assert answered(task, f"<answer>{wrapped.format(text)}</answer>").value == pytest.approx(0.1)
    task = load("simple_integration", 1)[0]
    assert answered(task, f"<answer>{task.answer} + 7</answer>").value == 1.0
    assert refused("intermediate_integration", "-3*sin(8*x - 4)**2/2 + exp(x)*(x - 1) + C", {"answer": "?"}) == ""
    assert refused("coin_flip", "1.5e-3", {"answer": "?"}) == ""


def test_every_scorer_that_evaluates_is_known():
    """A new version of reasoning-gym whose scorers evaluate elsewhere fails here."""
    import inspect

    suspicious = ("eval(", "exec(", "parse_expr(", "sympify(", "Fraction(", "literal_eval(", "subprocess", "__import__")
    found = set()
    for name in gym.names():
        text = inspect.getsource(gym.dataset(gym.Spec(name)).score_answer)
        found |= {name} if any(word in text for word in suspicious) else set()
    # number_sorting evaluates the right answer alone
    assert found == set(EVALUATED) | {"number_sorting"}


# --- every dataset

NO_ANSWER = {
    "boxnet": "any plan that lifts all boxes is right; it ships none",
    "rush_hour": "any solution of the board is right; it ships none",
}
EXAMPLES = {
    "graph_color": lambda held: json.dumps(held["possible_answer"]),
    "propositional_logic": lambda held: held["example_answer"],
    "rubiks_cube": lambda held: held["example_correct_answer"],
}
"""Datasets whose entries have no answer of their own, but an example among the metadata."""


def test_there_are_many():
    assert len(gym.names()) > 100
    assert set(SMALLER) | set(NO_ANSWER) | set(EXAMPLES) | set(EVALUATED) | gym.BY_TUPLES <= set(gym.names())


@pytest.mark.parametrize("name", sorted(set(gym.names()) - set(NO_ANSWER)))
def test_its_own_answer_is_right(name):
    for task in load(name):
        again = Task(task.id, task.prompt, task.answer, json.loads(json.dumps(dict(task.metadata))), task.source)
        right = EXAMPLES[name](task.metadata["metadata"]) if name in EXAMPLES else task.answer
        scored = answered(again, f"So <answer>{right}</answer>")
        assert (scored.value, scored.valid, scored.reason) == (1.0, True, "")


@pytest.mark.parametrize("name", sorted(NO_ANSWER))
def test_datasets_without_an_answer_score_others(name):
    task = load(name, 1)[0]
    assert task.answer is None
    assert answered(task, "<answer>{}</answer>").value < 0.1
    assert answered(task, "<answer>[1]</answer>").valid


MEAN = ["", "[]", "{}", "[[]]", "null", "-", "1", "(1, 2)", "a=b", "A=1,A=2", "0x", "1/0", "½", "\ud800"]


@pytest.mark.parametrize("name", gym.names())
def test_hostile_answers_never_raise(name):
    task = load(name, 1)[0]
    for text in [*(text for _, text in HOSTILE), *(f"<answer>{mean}</answer>" for mean in MEAN)]:
        scored = answered(task, text)
        assert scored.valid, (text[:80], scored.reason)
        assert scored.metrics["correct"] in (0.0, 1.0)
