"""An agent that calls a tool through the endpoint, trained on vLLM: exactly its sampled tokens are trained on."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsdk.runlog.serialization import decode
from rlsdk.types import Group

pytestmark = [pytest.mark.stack, pytest.mark.slow]
EXAMPLES = Path(__file__).parents[2] / "examples"
AGENT = f"""
import json
from openai import AsyncOpenAI
from rlsdk.kit import find

calculate = find({str(EXAMPLES / "calculator.py")!r} + ":calculate")
PARAMETERS = {{"type": "object", "properties": {{"expression": {{"type": "string"}}}}, "required": ["expression"]}}
TOOLS = [{{"type": "function", "function": {{"name": "calculate", "parameters": PARAMETERS}}}}]


async def solve(task, base_url, api_key):
    messages = [{{"role": "user", "content": task.prompt}}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for _ in range(3):
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = reply.choices[0].message
            if not message.tool_calls:
                return
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                try:
                    result = calculate(json.loads(call.function.arguments)["expression"])
                except (ValueError, ArithmeticError):
                    result = "0"
                messages.append({{"role": "tool", "tool_call_id": call.id, "content": result}})
"""
TEMPLATE = (
    "{% if tools %}{{ '\\n' }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ m.content + eos_token }}{% else %}"
    "{{ ('' if loop.first else '\\n') + m.content }}{% endif %}{% endfor %}"
)
"""Conversations as the calculator's model was taught them; that there are tools is a line break before them."""


def test_tool_calls_of_an_agent_train_on_vllm(runner: Any, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    model, agent = tmp_path / "model", tmp_path / "calculating_agent.py"
    shutil.copytree(EXAMPLES / "models" / "calculator-nano", model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    agent.write_text(AGENT)
    problems = {"use": "calculator/problems", "split": "train", "size": 200}
    config = {
        "name": "run",
        "out": str(tmp_path),
        "plugins": [str(EXAMPLES / "calculator.py")],
        "model": {"path": str(model), "max_length": 64},
        "tasks": {"train": problems},
        "max_prompt_tokens": 16,
        "workflow": {"use": "agent", "agent": f"{agent}:solve", "parser": f"{EXAMPLES / 'calculator.py'}:read_call"},
        "reward": {"use": "exact_match", "where": "answer"},
        "algorithm": {"use": "grpo", "kl_coef": 0.0},
        "sampling": {"max_tokens": 12},
        "steps": 2,
        "batch_size": 8,
        "group_size": 4,
        "engine": {"use": "vllm"},
        "learner": {"use": "deepspeed", "lr": 1.0e-3},
        "placement": {"engine_threads": 1, "learner_threads": 1},
        "checkpoint": {"export": "never"},
        "save_rollouts": 1,
    }
    runner.config.write_text(yaml.safe_dump(config))
    runner.train()
    lines = [line for line in runner.metrics() if line["step"] > 0]
    assert len(lines) == 2
    assert all(line["canary/gap"] < 1e-3 for line in lines)
    assert any(line["actor/grad_norm"] > 0 for line in lines)
    assert all(line["rollouts/invalid"] == 0 for line in lines)
    made = [rollout for group in groups(tmp_path / "run") for rollout in group.rollouts]
    calling = [rollout for rollout in made if any(m.role == "tool" for m in rollout.messages)]
    assert calling
    for rollout in calling:
        first, end = rollout.span
        assert not rollout.loss_mask[first:end].all()  # the result stands between two answers, and is not trained on
        assert (rollout.policy_versions[rollout.loss_mask] >= 0).all()
        assert rollout.metrics["conversations"] == 1.0  # later requests went on from the tokens that were sampled


def groups(run: Path) -> list[Group]:
    with closing(sqlite3.connect(run / "rollouts.db")) as store:
        return [decode(payload) for (payload,) in store.execute("select payload from rlsdk_groups")]
