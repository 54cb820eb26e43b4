"""Unmodified rewards of other trainers: each convention, with functions as in its documentation."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import re
import sys
import textwrap
from typing import get_args

import attrs
import pytest
from click.testing import CliRunner

import rlsdk
from rlsdk.cli import root
from rlsdk.contracts import RewardSpec, ScoringLimits, batch_of
from rlsdk.errors import ConfigError, DataError, OptionError
from rlsdk.rewards.conventions import CONVENTIONS, Parameters
from rlsdk.rewards.foreign import Style
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.types import Message, Rollout, Task

TASK = Task(id="t1", prompt="2+2?", answer="4", metadata={"level": 3, "extra_info": {"index": 7}}, source="sums")
CHAT = Task(id="t2", prompt=(Message("system", "Be brief."), Message("user", "2+2?")), answer="4", source="sums")


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(code, name="reward", **options):
        (tmp_path / "mine.py").write_text(textwrap.dedent(code))
        return rlsdk.load("reward", "foreign", path=f"mine.py:{name}", **options)

    return make


def answers(*texts, task=TASK):
    return [Rollout.from_text(task, text) for text in texts]


def sampled(task, text, ids):
    """A rollout with tokens: one of the prompt, and those that were sampled."""
    made = Rollout.from_text(task, text)
    count = len(ids)
    return Rollout(task, made.messages, [99, *ids], [0] + [1] * count, [0.0] * (count + 1), [0] * (count + 1))


def values(scores):
    return [score.value if score.valid else None for score in scores]


# --- recognition


@pytest.mark.parametrize(
    ("signature", "style"),
    [
        ("completions, **kwargs", "trl"),
        ("completions: list[list[dict[str, str]]], solution: list[str], **kwargs", "trl"),
        ("prompts, completions, completion_ids, trainer_state=None, log_extra=None, log_metric=None, **kwargs", "trl"),
        ("completion_ids: list[list[int]], **kwargs", "trl"),
        ("completions, ground_truth, **kwargs", "trl"),
        ("data_source, solution_str, ground_truth, extra_info=None", "verl"),
        ("data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None, **kwargs", "verl"),
        ("solution_str, ground_truth, method='strict', format_score=0.0, score=1.0", "verl"),
        ("data_sources, solution_strs, ground_truths, extra_infos", "verl_batch"),
        ("data_sources, solution_strs, ground_truths, extra_infos, **kwargs", "verl_batch"),
        ("queries, prompts, labels", "openrlhf"),
        ("queries, prompts, labels, **kwargs", "openrlhf"),
        ("completion, answer, **kwargs", "verifiers"),
        ("prompt, completion, answer, state", "verifiers"),
        ("parser, completion, answer", "verifiers"),
        ("completion, info", "verifiers"),
        ("answer, entry", "reasoning_gym"),
        ("self, answer: Optional[str], entry: dict[str, Any]", "reasoning_gym"),
        ("response, truth", "trinity"),
        ("response: str, prompt: Optional[str] = None, truth: Optional[str] = None", "trinity"),
        ("response, label, extra_info", "xtuner"),
    ],
)
def test_published_signatures_are_recognised(load, signature, style):
    code = f"from typing import Any, Optional\ndef reward({signature}): ...\n"
    if signature.startswith("self, "):
        code = f"from typing import Any, Optional\nclass D:\n    def score_answer({signature}): ...\ndata = D()\n"
        assert load(code, "data").convention == style
        assert load(code, "data.score_answer").convention == style
    else:
        assert load(code).convention == style


def test_every_convention_has_its_style():
    assert {"auto", *CONVENTIONS} == set(get_args(Style))


@pytest.mark.parametrize(
    "signature",
    [
        "text",
        "**kwargs",
        "prompt, completions, prompt_ids, completion_ids, **data",  # of AReaL: one string
        "prompts, completions, answers, states",  # of verifiers, for a whole group
        "task, trace",
        "answer",
    ],
)
def test_an_unknown_signature_is_answered_with_what_there_is(load, signature):
    with pytest.raises(OptionError) as caught:
        load(f"def reward({signature}): ...")
    text = str(caught.value)
    assert text.startswith(f"reward 'foreign': style: mine.py:reward takes ({signature})")
    assert all(f"\n      {name}: " in text for name in CONVENTIONS)


def test_an_ambiguous_signature_is_answered_with_the_candidates(load):
    code = "def reward(completions, solution_str, ground_truth, **kwargs): ..."
    with pytest.raises(OptionError, match="is the signature of trl and verl; write one of them"):
        load(code)
    assert load(code, style="verl", arguments={"completions": 1}).convention == "verl"


@pytest.mark.parametrize(
    ("code", "options", "cause"),
    [
        ("def reward(solution_str, ground_truth, url): ...", {}, "arguments: mine.py:reward asks for url, which verl"),
        ("def reward(completions, trainer_state): ...", {}, "path: mine.py:reward asks for trainer_state, which only"),
        ("def reward(solution_str, ground_truth): ...", {"arguments": {"x": 1}}, "arguments: .* it has no x"),
        ("def reward(text): ...", {"style": "openrlhf"}, "path: .* openrlhf calls reward_func"),
        ("def reward(text): ...", {"style": "verll"}, "style: .*did you mean 'verl'"),
        ("reward = 5", {}, "path: names an object of type int; expected a function"),
        ("def other(): ...", {}, "path: mine.py has no 'reward'.*it has: other"),
        ("def rewart(): ...", {}, "path: mine.py has no 'reward', did you mean 'rewart'"),
        ("import json\nfrom json import dumps\nrewart = open", {}, "path: .*did you mean 'rewart'.; it has: rewart$"),
        ("import nowhere", {}, "path: mine.py cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("raise SystemExit(3)", {}, "path: mine.py cannot be imported: SystemExit: 3"),
        ("def (", {}, "path: mine.py cannot be imported: SyntaxError"),
        ("class reward:\n    def __init__(self, a): ...", {}, "arguments: TypeError: .*'a'"),
    ],
)
def test_what_could_never_run_is_found_before_a_run(load, code, options, cause):
    with pytest.raises(OptionError, match=f"reward 'foreign': {cause}"):
        load(code, **options)


@pytest.mark.parametrize("path", ["mine.py", ":f", "mine.py:", "nowhere.py:f", "no.such.module:f", "json:nothing"])
def test_a_path_that_leads_nowhere(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    with pytest.raises(OptionError, match="path: "):
        rlsdk.load("reward", "foreign", path=path)


def test_a_module_that_is_a_file_of_the_working_folder_is_named_as_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judging").mkdir()
    (tmp_path / "judging" / "mine.py").write_text("def f(solution_str): return 2")
    with pytest.raises(OptionError, match=r"No module named 'judging'; for the file .* write judging/mine\.py"):
        rlsdk.load("reward", "foreign", path="judging.mine:f")


def test_functions_of_packages_and_of_files_with_neighbours(load, tmp_path, site):
    site.install("lab", {"labrewards/__init__.py": "", "labrewards/sums.py": "def f(solution_str): return 2"})
    reward = rlsdk.load("reward", "foreign", path="labrewards.sums:f")
    assert values(reward(answers("x"))) == [2.0]
    (tmp_path / "beside_foreign.py").write_text("VALUE = 3.0\n")
    before = list(sys.path)
    assert values(load("from beside_foreign import VALUE\ndef reward(solution_str): return VALUE")(answers("x"))) == [3]
    assert sys.path == before
    del sys.modules["beside_foreign"]


def test_a_file_is_run_once_for_each_content(load):
    code = "import itertools\nseen = itertools.count()\ndef reward(solution_str): return next(seen)\n"
    assert values(load(code)(answers("x"))) == [0.0]
    assert values(load(code)(answers("x"))) == [1.0]
    assert values(load(code + "# changed")(answers("x"))) == [0.0]


# --- TRL

TRL = """
    def reward(completions, ground_truth, **kwargs):
        contents = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [1.0 if content == truth else None if not content else 0.0
                for content, truth in zip(contents, ground_truth)]
"""


def test_trl_gets_lists_for_each_column(load):
    reward = load("""
        def reward(prompts, completions, level, log_extra=None, log_metric=None, **kwargs):
            assert prompts == ["2+2?", "2+2?"] and completions == ["4", "5"]
            assert level == [3, 3] and kwargs["answer"] == ["4", "4"] and kwargs["extra_info"] == [{"index": 7}] * 2
            assert "completion_ids" not in kwargs and "trainer_state" not in kwargs
            log_extra("length", [len(c) for c in completions])
            log_extra("text", list(completions))
            log_metric("mean", 0.25)
            return [c == a for c, a in zip(completions, kwargs["answer"])]
    """)
    right, wrong = reward(answers("4", "5"))
    assert (right.value, right.metrics) == (1.0, {"mean": 0.25, "length": 1.0})
    assert (wrong.value, wrong.valid) == (0.0, True)


def test_trl_none_is_not_applicable(load):
    right, wrong, empty = load(TRL)(answers("4", "5", ""))
    assert (right.value, wrong.value) == (1.0, 0.0)
    assert not empty.valid
    assert empty.reason == "it returned None: not applicable here; with `none: zero`, it counts as 0"
    assert values(load(TRL, none="zero")(answers("4", ""))) == [1.0, 0.0]


@pytest.mark.parametrize("style", ["verl", "verl_batch", "trinity"])
def test_one_number_of_a_mapping_may_be_the_score(load, style):
    parameters = {
        "verl": "data_source, solution_str, ground_truth, extra_info=None",
        "verl_batch": "data_sources, solution_strs, ground_truths, extra_infos",
        "trinity": "response, prompt, truth",
    }[style]
    numbers = '{"score": 0.5, "right": 1.0, "form": 0.25}'
    returned = f"[{numbers}] * len(solution_strs)" if style == "verl_batch" else numbers
    code = f"def reward({parameters}):\n    return {returned}\n"
    for key in ("right", "form"):
        (score,) = load(code, style=style, key=key)(answers("4"))
        assert (score.value, dict(score.metrics)) == ({"right": 1.0, "form": 0.25}[key], {})
    (score,) = load(code, style=style, key="rigth")(answers("4"))
    assert (score.valid, score.reason) == (
        False,
        "it returned a mapping with score, right, form; expected a mapping with 'rigth'",
    )
    plain = f"def reward({parameters}):\n    return 0.5\n"
    assert load(plain, style=style, key="right")(answers("4"))[0].reason == (
        "it returned 0.5; expected a mapping with 'right'"
    )


@pytest.mark.parametrize("none", ["invalid", "zero"])
def test_a_mapping_without_the_number_costs_only_its_own_rollout_the_score(load, none):
    code = """
        def reward(data_sources, solution_strs, ground_truths, extra_infos):
            return [{"right": 1.0}, {"form": 1.0}, {"right": None}, 0.5][:len(solution_strs)]
    """
    right, lacking, nothing, number = load(code, style="verl_batch", key="right", none=none)(
        answers("4", "5", "6", "7")
    )
    assert (right.valid, right.value, lacking.valid, nothing.valid, number.valid) == (
        True,
        1.0,
        False,
        none == "zero",
        False,
    )
    assert lacking.reason == "it returned a mapping with form; expected a mapping with 'right'"
    assert number.reason == "it returned 0.5; expected a mapping with 'right'"


def test_trl_conversations_are_messages(load):
    reward = load("""
        def reward(prompts, completions, **kwargs):
            assert prompts[0] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
            assert completions[0] == [{"role": "assistant", "content": "4"}]
            return [1.0]
    """)
    assert values(reward(answers("4", task=CHAT))) == [1.0]


READS_MESSAGES = "def reward(completions, **kwargs): return [len(c[0]['content']) for c in completions]"
READS_TEXT = "def reward(completions, **kwargs): return [len(c.strip()) for c in completions]"
MATCHES_TEXT = "import re\ndef reward(completion, answer): return bool(re.match('4', completion))"


@pytest.mark.parametrize(
    ("code", "task", "says"),
    [
        (
            READS_MESSAGES,
            TASK,
            "TypeError: string indices must be integers, not 'str' (mine.py, line 1); it was given text",
        ),
        (READS_TEXT, CHAT, "it was given lists of messages, since the task's prompt is one"),
        (MATCHES_TEXT, CHAT, "it was given lists of messages, since the task's prompt is one"),
    ],
)
def test_the_other_form_of_completions_is_explained(load, code, task, says):
    (score,) = load(code)(answers("4", task=task))
    assert says in score.reason


@pytest.mark.parametrize("raised", ["TypeError('unsupported operand')", "KeyError('gold')"])
def test_other_errors_say_nothing_of_the_form(load, raised):
    (score,) = load(f"def reward(completions, **kwargs): raise {raised}")(answers("4"))
    assert "it was given" not in score.reason


def test_a_prefill_belongs_to_the_completion(load):
    prompt = (Message("user", "2+2?"), Message("assistant", "<think>"))
    task = Task(id="p", prompt=prompt)
    messages = (prompt[0], Message("assistant", "<think>hm</think>4"))
    rollout = Rollout(task, messages, [1, 2], [0, 1], [0.0, 0.0], [-1, 0])
    reward = load(
        "def reward(completions, **kwargs): return [c[0]['content'] == '<think>hm</think>4' for c in completions]"
    )
    assert values(reward([rollout])) == [1.0]


def test_trl_token_ids_are_those_of_the_response(load):
    reward = load("def reward(completion_ids, **kwargs): return [len(ids) + ids[0] / 10 for ids in completion_ids]")
    assert values(reward([sampled(TASK, "a", [5, 6]), sampled(TASK, "b", [7])])) == [2.5, 1.7]
    with pytest.raises(DataError, match=r"task 't1': mine\.py:reward asks for completion_ids, but .* is text"):
        reward(answers("a"))


def test_a_missing_column_is_the_fault_of_the_data(load):
    reward = load("def reward(completions, solutions, **kwargs): return [0.0] * len(completions)")
    with pytest.raises(DataError, match=r"task 't1': mine.py:reward asks for solutions, .*: level, extra_info\. A"):
        reward(answers("a"))


@pytest.mark.filterwarnings("error")
def test_a_forgotten_await_is_the_reason(load):
    reward = load("""
        async def one(completion): return 1.0
        async def reward(completions, **kwargs): return [one(c) for c in completions]
    """)
    (score,) = asyncio.run(reward(answers("a")))
    assert score.reason == "it returned the coroutine one without awaiting it; expected a number"


@pytest.mark.parametrize(
    ("returned", "cause"),
    [
        ("[1.0]", "it returned 1 reward for 2 rollouts; expected one"),
        ("0.5", "it returned 0.5; expected a list of 2 numbers"),
        ("None", "it returned None; expected a list of 2 numbers"),
        ("'ab'", "it returned 'ab'; expected a list of 2 numbers"),
        ("[float('nan'), float('inf')]", "it returned (nan|inf)"),
        ("['1', [1]]", "expected a number"),
        ("[10**400, 1j]", "it returned inf|expected a number"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(mine.py, line 1\); the call was for all 2"),
    ],
)
def test_wrong_results_are_invalid_with_the_reason(load, returned, cause):
    scores = load(f"def reward(completions, **kwargs): return {returned}")(answers("a", "b"))
    assert len(scores) == 2
    for score in scores:
        assert not score.valid
        assert re.search(cause, score.reason), score.reason


def test_arrays_and_tensors_are_lists_of_numbers(load):
    pytest.importorskip("torch")
    code = "import numpy\ndef reward(completions): return numpy.array([1, 0])"
    assert values(load(code)(answers("a", "b"))) == [1.0, 0.0]
    code = "import torch\ndef reward(completions): return [torch.tensor(0.5), torch.tensor([0.25])]"
    assert values(load(code)(answers("a", "b"))) == [0.5, 0.25]


def test_generators_and_columns_are_lists_of_numbers(load):
    assert values(load("def reward(completions, **kwargs): return (len(c) for c in completions)")(answers("4"))) == [
        1.0
    ]
    endless = load("import itertools\ndef reward(completions, **kwargs): return itertools.repeat(1.0)")
    assert "2 rewards for 1 rollout" in endless(answers("4"))[0].reason
    broken = load("def reward(completions, **kwargs): return (1 / 0 for c in completions)")
    assert "ZeroDivisionError" in broken(answers("4"))[0].reason
    column = load("import numpy\ndef reward(completions, **kwargs): return numpy.ones((len(completions), 1))")
    assert values(column(answers("4", "5"))) == [1.0, 1.0]


def test_callable_objects_and_classes(load):
    code = """
        class Scaled:
            def __init__(self, scale=1.0):
                self.scale = scale
            def __call__(self, completions, **kwargs):
                return [self.scale * len(c) for c in completions]
        reward = Scaled(3)
    """
    assert values(load(code)(answers("ab"))) == [6.0]
    assert values(load(code, "Scaled", arguments={"scale": 2.0})(answers("ab"))) == [4.0]


# --- veRL


def test_verl_per_sample(load):
    reward = load("""
        def reward(data_source, solution_str, ground_truth, extra_info=None):
            assert data_source == "sums" and extra_info == {"index": 7, "num_turns": 2, "rollout_reward_scores": {}}
            return float(solution_str == ground_truth)
    """)
    assert values(reward(answers("4", "5"))) == [1.0, 0.0]


def test_verl_mappings_are_a_score_and_metrics(load):
    reward = load("""
        def reward(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
            if not solution_str:
                return {"acc": 0}
            right = solution_str == ground_truth
            return {"score": (1.0 if right else -1.0) + bonus, "acc": right, "pred": solution_str}
    """, arguments={"bonus": 0.5})  # fmt: skip
    right, wrong, broken = reward(answers("4", "5", ""))
    assert (right.value, right.metrics) == (1.5, {"acc": 1.0})
    assert (wrong.value, wrong.metrics) == (-0.5, {"acc": 0.0})
    assert (broken.valid, broken.reason) == (False, "it returned a mapping without 'score'; its keys: acc")


def test_one_sample_that_raises_does_not_spoil_the_others(load):
    reward = load("def reward(solution_str, ground_truth): return 1 / int(solution_str)")
    first, second, third = reward(answers("2", "0", "x"))
    assert first.value == 0.5
    assert (second.valid, second.reason) == (False, "ZeroDivisionError: division by zero (mine.py, line 1)")
    assert (third.valid, "ValueError: invalid literal" in third.reason) == (False, True)


def test_verl_batch(load):
    reward = load("""
        def reward(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
            assert data_sources == ["sums"] * 2 and [each["index"] for each in extra_infos] == [7, 7] and not kwargs
            return [{"score": 1.0, "n": 2}, float(solution_strs[1] == ground_truths[1])]
    """)
    first, second = reward(answers("3", "4"))
    assert (first.value, dict(first.metrics), second.value) == (1.0, {"n": 2.0}, 1.0)


def test_a_task_without_extra_info_gives_its_metadata(load):
    reward = load("def reward(solution_str, ground_truth, extra_info): return extra_info['level']")
    assert values(reward(answers("a", task=Task(id="x", prompt="?", metadata={"level": 5})))) == [5.0]


def test_verl_counts_turns(load):
    def said(*roles):
        return tuple(Message(role, "x") for role in roles)

    task = Task(id="x", prompt=said("system", "user"))
    one = attrs.evolve(Rollout.from_text(task, "x"), messages=said("system", "user", "assistant"))
    tools = said("system", "user", "assistant", "tool", "tool", "assistant", "user", "assistant")
    reward = load("def reward(solution_str, extra_info): return extra_info['num_turns']", style="verl")
    assert values(reward([one, attrs.evolve(one, messages=tools)])) == [2.0, 6.0]


def test_what_a_function_changes_is_its_own(load):
    task = Task(id="x", prompt="?", answer=[3, 4], metadata={"extra_info": {"seen": []}})
    reward = load("""
        def reward(solution_str, ground_truth, extra_info):
            extra_info["seen"].append(solution_str)
            return ground_truth.pop() + len(extra_info["seen"])
    """)
    assert values(reward(answers("a", "b", task=task))) == [5.0, 5.0]


# --- XTuner


def test_xtuner_gets_the_answer_as_label_and_the_extra_info_of_its_judger(load):
    code = """
        def reward(response, label, extra_info):
            score = extra_info["score"] if response == label else extra_info.get("format_score", 0)
            return {"score": score, "acc": response == label}
    """
    reward = load(code, arguments={"extra_info": {"score": 1, "format_score": 0.1}})
    right, wrong = reward(answers("4", "5"))
    assert (right.value, wrong.value, right.metrics) == (1.0, 0.1, {"acc": 1.0})
    without, wrong = load(code)(answers("4", "5"))  # a judger has no extra_info by default
    assert (without.valid, wrong.value) == (False, 0.0)


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("def __init__(self, worker_config): ...\n    def compute_rewards(self, data): ...", "a reward worker of ROLL"),
        ("async def run_single(self, data): ...", "a reward manager of veRL"),
        (
            "def __init__(self, tokenizer, num_examine): ...\n    def __call__(self, data, return_dict=False): ...",
            "a reward manager of veRL",
        ),
        ("async def judge_payload(self, payload): ...", "a judger of XTuner"),
    ],
)
def test_classes_that_score_batches_of_their_trainer_are_refused(load, code, named):
    with pytest.raises(OptionError, match=f"path: names {named}, which scores that trainer's own batches; name the"):
        load(f"class R:\n    {code}\n", "R")


# --- OpenRLHF


def test_openrlhf_gets_lists_of_one(load):
    pytest.importorskip("torch")
    reward = load("""
        import torch
        def reward(queries, prompts, labels, **kwargs):
            assert (queries, prompts, labels) == (["2+2?4"], ["2+2?"], ["4"]) and not kwargs
            right = torch.tensor([float(q.endswith(l)) for q, l in zip(queries, labels)])
            return {"rewards": right - 0.5, "scores": right, "extra_logs": {"length": torch.tensor([5.0])}}
    """)
    (score,) = reward(answers("4"))
    assert (score.value, score.metrics) == (0.5, {"scores": 1.0, "length": 5.0})


@pytest.mark.parametrize(
    ("returned", "expected"), [("[0.5]", 0.5), ("{'rewards': [2]}", 2.0), ("{'scores': [2]}", None), ("[1, 2]", None)]
)
def test_openrlhf_results(load, returned, expected):
    assert values(load(f"def reward(queries, prompts, labels): return {returned}")(answers("4"))) == [expected]


# --- verifiers


def test_verifiers_passes_the_named_arguments(load):
    reward = load("""
        def reward(parser, completion, answer, state, info, task, **kwargs):
            assert state["prompt"] == kwargs["prompt"] and task == "sums"
            return float(parser.parse_answer(completion) == answer)
    """)
    assert values(reward(answers("4", "5"))) == [1.0, 0.0]
    assert values(reward(answers("4", task=CHAT))) == [1.0]
    assert values(load("def reward(completion, info): return info['level']")(answers("4"))) == [3.0]


def test_verifiers_async(load):
    reward = load("""
        import asyncio
        async def reward(completion, answer):
            await asyncio.sleep(0)
            return 1.0 if completion == answer else 1 / 0
    """)
    right, wrong = asyncio.run(_await(reward(answers("4", "5"))))
    assert right.value == 1.0
    assert (wrong.valid, wrong.reason) == (False, "ZeroDivisionError: division by zero (mine.py, line 5)")


async def _await(something):
    assert inspect.isawaitable(something)
    return await something


# --- reasoning-gym


def test_reasoning_gym_gets_the_answer_in_its_tags(load):
    reward = load("""
        def reward(answer, entry):
            assert entry["question"] == "2+2?" and entry["metadata"]["level"] == 3
            return 0.01 if answer is None else float(answer == entry["answer"])
    """)
    assert values(reward(answers("<answer> 4 </answer>", "<answer>5</answer>", "4"))) == [1.0, 0.0, 0.01]


# --- Trinity-RFT

TRINITY = """
    from abc import ABC
    class RewardFn(ABC):
        def __init__(self, **kwargs): ...
    class Reward(RewardFn):
        def __init__(self, weight=1.0):
            self.weight = weight
        def __call__(self, response, prompt=None, truth=None):
            assert prompt == "2+2?"
            return {"accuracy": self.weight * (response == truth), "format": 0.1}
    class Free(RewardFn):
        def __call__(self, **kwargs):
            return {} if sorted(kwargs) == ["prompt", "response", "truth"] else {"a": 1.0}
"""


def test_trinity_classes_are_instantiated_and_their_parts_added(load):
    right, wrong = load(TRINITY, "Reward", arguments={"weight": 2.0})(answers("4", "5"))
    assert right.value == pytest.approx(2.1)
    assert right.metrics == {"accuracy": 2.0, "format": 0.1}
    assert wrong.value == pytest.approx(0.1)


def test_trinity_without_named_parameters(load):
    reward = load(TRINITY, "Free")
    assert reward.convention == "trinity"
    (score,) = reward(answers("4"))
    assert (score.valid, "empty mapping" in score.reason) == (False, True)


# --- in a run


def test_in_the_scorer_beside_another_part(load):
    part = RewardTerm(RewardSpec("foreign", 0.5), load(TRL))
    scorer = Scorer(
        [part, RewardTerm(RewardSpec("exact"), rlsdk.load("reward", "foreign", path="mine.py:reward", none="zero"))]
    )

    async def score(rollouts):
        return await asyncio.gather(*(scorer.score(rollout) for rollout in rollouts))

    right, wrong, empty = asyncio.run(score(answers("4", "5", "")))
    assert (right.value, wrong.value, right.metrics["reward/foreign"]) == (1.5, 0.0, 1.0)
    assert not empty.valid
    assert empty.reason == "foreign: it returned None: not applicable here; with `none: zero`, it counts as 0"


YAML = """\
name: trial
model: {path: FOLDER}
tasks: {train: countdown}
reward: {use: foreign, path: "FOLDER/mine.py:reward", style: auto}
algorithm: grpo
steps: 2
batch_size: 4
group_size: 4
engine: transformers
placement: {device: cpu}
"""


def test_explain_checks_and_shows_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "mine.py").write_text(textwrap.dedent(TRL))
    config = tmp_path / "trial.yaml"
    config.write_text(YAML.replace("FOLDER", str(tmp_path)))
    ran = CliRunner().invoke(root, ["explain", str(config), "--json"])
    assert ran.exit_code == 0, ran.stderr
    plan = json.loads(ran.output)["plan"]
    assert plan["rollouts"]["rewards"] == [f"1 × foreign(path={tmp_path}/mine.py:reward, style=auto)"]
    (tmp_path / "mine.py").write_text("import nowhere\n")
    ran = CliRunner().invoke(root, ["explain", str(config)])
    assert ran.exit_code == 2
    assert "  - reward.path: " in ran.stderr
    assert "cannot be imported: ModuleNotFoundError: No module named 'nowhere'" in ran.stderr
    (tmp_path / "mine.py").write_text("def reward(text): ...\n")
    with pytest.raises(ConfigError, match=r"reward.style: .* takes \(text\), which is the signature of none"):
        rlsdk.config.check(config)


# --- the packages themselves, where they are installed


ASKED = ("1/3?", r"\frac{1}{3}")
WRITTEN = (
    r"So \boxed{\frac{1}{3}}",
    r"<think>\nhm\n</think>\nIt is \boxed{\frac{1}{2}}, or is it, or is it, or is it",
    r"<think>\nhm\n</think>\n\boxed{\frac{1}{3}}",
    "no idea",
)
TRLS = {
    "accuracy_reward": "",
    "reasoning_accuracy_reward": "",
    "think_format_reward": "",
    "cosine": "from trl.rewards import get_cosine_scaled_reward as made\ncosine = made(max_len=40)\n",
    "repetition": "from trl.rewards import get_repetition_penalty_reward as made\nrepetition = made(2, -1.0)\n",
    "overlong": "from trl.rewards import get_soft_overlong_punishment as made\noverlong = made(30, 15)\n",
}


def answered():
    """A group of one task, every letter a token, in the conversational form of TRL's examples."""
    task = Task(id="t", prompt=(Message("user", ASKED[0]),), answer=ASKED[1])
    return [sampled(task, text, list(text.encode())) for text in WRITTEN]


def as_trl_calls(function):
    """Arguments that TRL's trainer passes (GRPOTrainer._calculate_rewards): lists by keyword, including columns."""
    return function(
        prompts=[[{"role": "user", "content": ASKED[0]}]] * len(WRITTEN),
        completions=[[{"role": "assistant", "content": text}] for text in WRITTEN],
        completion_ids=[list(text.encode()) for text in WRITTEN],
        solution=[ASKED[1]] * len(WRITTEN),
    )


@pytest.mark.parametrize("name", TRLS)
def test_trls_own_functions_give_the_values_that_they_give_in_trl(load, name):
    import trl.rewards

    reward = load(TRLS[name], name) if TRLS[name] else rlsdk.load("reward", "foreign", path=f"trl.rewards:{name}")
    own = vars(sys.modules[reward._call.__module__]) if TRLS[name] else {}
    expected = as_trl_calls(reward._call if own else getattr(trl.rewards, name))
    assert (reward.convention, batch_of(reward)) == ("trl", "group")
    assert values(reward(answered())) == expected
    assert len(set(expected)) > 1  # it tells the answers apart


def test_trls_own_functions_run_in_the_pool_as_one_reward():
    import trl.rewards

    plugins = rlsdk.Plugins()
    names = ("accuracy_reward", "think_format_reward")
    parts = []
    for name in names:
        reference = plugins.reference("reward", "foreign", {"path": f"trl.rewards:{name}"})
        parts.append(RewardTerm(RewardSpec(name), plugins.resolve(reference), reference))
    scorer = Scorer(parts, ScoringLimits(timeout=60.0, workers=1))
    try:
        found = asyncio.run(scorer.score_group(answered()))
    finally:
        scorer.close()
    for name in names:
        expected = as_trl_calls(getattr(trl.rewards, name))
        assert [score.metrics[f"reward/{name}"] for score in found] == expected
    assert scorer.counts["calls"] == len(names)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_one_failed_request_costs_a_group_its_scores_unless_each_is_scored_by_itself(load, tmp_path, kind):
    code = f"{kind} reward(completions, **kwargs): return [1 / len(c) for c in completions]"
    load(code)
    plugins, found = rlsdk.Plugins(), {}
    for batch in ("group", "any"):
        reference = plugins.reference("reward", "foreign", {"path": f"{tmp_path}/mine.py:reward", "batch": batch})
        term = RewardTerm(RewardSpec("mine"), plugins.resolve(reference), reference)
        scorer = Scorer([term], ScoringLimits(timeout=60.0, workers=1))
        try:
            found[batch] = asyncio.run(scorer.score_group(answers("a", "", "bb")))
        finally:
            scorer.close()
    assert values(found["group"]) == [None] * 3
    assert found["group"][0].reason.endswith(
        "; the call was for all 3 rollouts of the task, so none of them has a score"
    )
    assert values(found["any"]) == [1.0, None, 0.5]


def test_trl_accuracy_of_what_it_cannot_parse_is_not_applicable():
    unparsable = Task(id="u", prompt=(Message("user", "?"),), answer="")
    accuracy = rlsdk.load("reward", "foreign", path="trl.rewards:accuracy_reward")
    assert not accuracy([Rollout.from_text(unparsable, "x")])[0].valid


def test_functions_that_take_lists_get_whole_groups_by_default(load):
    compares = "def reward(completions, **kwargs): return [len(c) - sum(map(len, completions)) for c in completions]"
    assert batch_of(load(compares)) == "group"
    assert batch_of(load(compares, batch="any")) is True
    assert batch_of(load("def reward(solution_strs, ground_truths): ...")) == "group"
    assert batch_of(load("def reward(solution_str, ground_truth): ...")) is True


def test_datasets_of_reasoning_gym(load):
    gym = pytest.importorskip("reasoning_gym", reason="make test-slow runs this where it is installed")

    data = gym.create_dataset("chain_sum", size=3, seed=1)
    reward = load("import reasoning_gym\ndata = reasoning_gym.create_dataset('chain_sum', size=3, seed=1)\n", "data")
    assert reward.convention == "reasoning_gym"
    for entry in data:
        task = Task(id="g", prompt=entry["question"], answer=entry["answer"], metadata={"metadata": entry["metadata"]})
        right, partial, nothing = reward(
            answers(f"<answer>{entry['answer']}</answer>", f"<answer>{entry['answer']} or so</answer>", "?", task=task)
        )
        assert (right.value, nothing.value) == (1.0, 0.0)
        assert 0 < partial.value < 1
        assert math.isclose(partial.value, data.score_answer(f"{entry['answer']} or so", entry))


@pytest.mark.parametrize(
    ("name", "nothing"),
    [("puzzle24", 0.01), ("prime_factorization", 0.0), ("knights_knaves", 0.0), ("sudoku", 0.0), ("coin_flip", 0.0)],
)
def test_scorers_of_reasoning_gym_by_signature(load, name, nothing):
    """Those with their own scorer, as `path: FILE:object.method`; if it raises, the score is invalid."""
    gym = pytest.importorskip("reasoning_gym", reason="make test-slow runs this where it is installed")

    (entry,) = gym.create_dataset(name, size=1, seed=4)
    reward = load(f"import reasoning_gym\ndata = reasoning_gym.create_dataset({name!r}, size=1)", "data.score_answer")
    task = Task(id="g", prompt=entry["question"], answer=entry["answer"], metadata=entry["metadata"])
    right, none, wrong = reward(answers(f"<answer>{entry['answer']}</answer>", "?", "<answer>no</answer>", task=task))
    assert (right.value, none.value) == (1.0, nothing)
    assert wrong.valid == (name != "prime_factorization")  # which reads numbers with int()
    assert wrong.value < 0.5


def test_reading_parameters():
    found = Parameters.of(importlib.import_module("json").dumps)
    assert found.others
    assert found.required == {"obj"}
    assert found.text.startswith("(obj, ")


def test_the_file_is_part_of_the_inputs_of_a_run(load, tmp_path):
    reward = load(TRL)
    [(name, before)] = reward.marks.items()
    assert name == f"foreign {reward.path}"
    assert load(TRL).marks[name] == before
    assert load(textwrap.dedent(TRL) + "\n# another\n").marks[name] != before
