"""An agent of the library, unchanged, on a scripted policy: its tools are called, its tokens recorded.

These tests run where openai-agents is installed; `make test-slow` installs it in a folder of its own and runs them
(tests/packages/test_agents.py).
"""

from __future__ import annotations

import httpx
import pytest

import rlsdk
from rlsdk.contracts import RewardSpec
from rlsdk.errors import OptionError
from rlsdk.testing import ChatTokenizer, RewardTerm, Scorer, run_workflow
from rlsdk.types import Image, Message, Task

pytest.importorskip("agents", reason="openai-agents is not installed here; make test-slow runs these where it is")
from rlsdk_agents.workflow import AgentsWorkflow

SOURCE = '''
from agents import Agent, function_tool
from pydantic import BaseModel

called = []

class Sum(BaseModel):
    value: int
    sure: bool

@function_tool
def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    called.append((a, b))
    return a + b

assistant = Agent(name="Assistant", instructions="Use your tools.", tools=[add], model="gpt-5")
clerk = Agent(name="Clerk", instructions="Be exact.", model="gpt-5-mini")
typed = Agent(name="Typed", instructions="Be exact.", model="gpt-5-mini", output_type=Sum)
desk = Agent(name="Desk", instructions="Hand over.", handoffs=[clerk])
'''
TEMPLATE = (
    "{% if tools %}<system>{% for t in tools %}{{ t.function.name }} {% endfor %}\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
HAND_OVER = '<tool_call>{"name": "transfer_to_clerk", "arguments": {}}</tool_call>'
TASK = Task(id="t", prompt=[Message("user", "What is 1 + 2?")], answer="3")


@pytest.fixture(scope="module")
def codec() -> ChatTokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "</s>"]
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", chat_template=TEMPLATE))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("lab") / "agents_lab.py"
    path.write_text(SOURCE)
    return str(path)


def run(codec, file, name, *answers, task=TASK, size=1, **options):
    said = iter(answers)
    workflow = rlsdk.load("workflow", AgentsWorkflow, agent=f"{file}:{name}", **options)
    scorer = Scorer([RewardTerm(RewardSpec("exact"), lambda rollout: float(rollout.text == rollout.task.answer))])
    script = {"max_tokens": 200, "max_length": 2000, "group_size": size, "scorer": scorer}
    return run_workflow(workflow, [task], codec, lambda _: next(said), **script)[0]


def test_an_agent_with_a_tool_is_one_rollout_token_by_token(codec, file):
    from rlsdk.kit import find

    group = run(codec, file, "assistant", CALL, "3")
    (rollout,), (score,) = group.rollouts, group.scores
    assert find(f"{file}:called") == [(1.0, 2.0)]
    assert (score.value, rollout.status, rollout.text) == (1.0, "finished", "3")
    assert [m.role for m in rollout.messages] == ["system", "user", "assistant", "tool", "assistant"]
    shown = codec.shown(rollout.token_ids)
    start = "<system>add <system>Use your tools.</s>\n<user>What is 1 + 2?</s>\n<assistant>"
    assert shown == f"{start}{CALL}</s>\n<tool>3.0</s>\n<assistant>3</s>"
    assert codec.shown(rollout.token_ids[rollout.loss_mask]) == f"{CALL}</s>3</s>"
    assert (rollout.logprobs != 0).tolist() == rollout.loss_mask.tolist()
    assert (rollout.policy_versions >= 0).tolist() == rollout.loss_mask.tolist()


def test_a_handoff_is_a_conversation_of_the_same_trajectory(codec, file):
    group = run(codec, file, "desk", HAND_OVER, "3")
    assert [r.step for r in group.rollouts] == [0, 1]
    assert len({r.trajectory for r in group.rollouts}) == 1
    assert [s.value for s in group.scores] == [1.0, 1.0]  # the first one said nothing of 3
    written = [codec.shown(r.token_ids[r.loss_mask]) for r in group.rollouts]
    assert written == [f"{HAND_OVER}</s>", "3</s>"]


def test_rewards_read_a_typed_output_as_json(codec, file):
    group = run(codec, file, "typed", '{"value": 3, "sure": true}', task=Task(id="t", prompt="1 + 2?"))
    assert group.rollouts[0].text == '{"value":3,"sure":true}'


def test_images_of_a_prompt_are_passed_on():
    from agents.models.chatcmpl_converter import Converter
    from rlsdk_agents.workflow import _input

    image = Image("data:image/png;base64,iVBORw0KGgo=")
    prompt = [Message("system", "Look."), Message("user", [image, "What is it?"])]
    system, user = Converter.items_to_messages(_input(Task(id="t", prompt=prompt)))
    assert system["content"] == "Look."
    assert [part["type"] for part in user["content"]] == ["image_url", "text"]
    assert user["content"][0]["image_url"]["url"] == image.url


def test_limits_and_failures(codec, file):
    turns = run(codec, file, "assistant", *[CALL] * 3, max_turns=2)
    assert [(r.status, r.metrics["turns"]) for r in turns.rollouts] == [("truncated", 2.0)]
    long = run(codec, file, "assistant", "x", task=Task(id="t", prompt="word " * 500))
    assert not long.scores[0].valid  # nothing was sampled
    with pytest.raises(OptionError, match=r"expected an agents\.Agent"):
        rlsdk.load("workflow", AgentsWorkflow, agent=f"{file}:called")
    with pytest.raises(OptionError, match="max_turns: expected int >= 1, got 0"):
        rlsdk.load("workflow", AgentsWorkflow, agent=f"{file}:assistant", max_turns=0)
    with pytest.raises(OptionError, match="has no 'asistant', did you mean 'assistant'"):
        rlsdk.load("workflow", AgentsWorkflow, agent=f"{file}:asistant")


@pytest.mark.parametrize(
    ("name", "answer"),
    [("assistant", '<tool_call>{"name": "sum", "arguments": {}}</tool_call>'), ("typed", '{"value": "three"}')],
    ids=["unknown tool", "wrong type"],
)
def test_a_mistake_of_the_policy_is_scored_and_no_failure_of_the_rollout(codec, file, name, answer):
    group = run(codec, file, name, answer)
    (rollout,), (score,) = group.rollouts, group.scores
    assert (rollout.status, score.valid, score.value, rollout.metrics["model_errors"]) == ("finished", True, 0.0, 1.0)
    assert run(codec, file, "clerk", "3").rollouts[0].metrics["model_errors"] == 0.0


def test_members_of_a_group_work_at_once_and_nothing_answers_after_the_end(codec, file, monkeypatch):
    urls = []
    inner = AgentsWorkflow._run

    async def spied(self, task, served):
        urls.append(served.base_url)
        return await inner(self, task, served)

    monkeypatch.setattr(AgentsWorkflow, "_run", spied)
    group = run(codec, file, "clerk", *["3"] * 4, size=4)
    assert [s.value for s in group.scores] == [1.0] * 4
    assert len({r.trajectory for r in group.rollouts}) == len(set(urls)) == 4
    with pytest.raises(httpx.ConnectError):
        httpx.get(urls[0] + "/models", trust_env=False)
