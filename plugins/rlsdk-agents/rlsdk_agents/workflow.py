"""Runs an agent of the OpenAI Agents SDK with the policy in place of its models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs

import rlsdk
from rlsdk.contracts import Chat, Served
from rlsdk.errors import OptionError, ValueFault
from rlsdk.kit import Dialect, LateError, attended, find, within
from rlsdk.types import Rollout, Task

NAME = "workflow 'agents/workflow'"


@rlsdk.workflow("workflow")
@attrs.frozen(kw_only=True)
class AgentsWorkflow:
    """Runs an agent, with its tools and handoffs, on the task's prompt; its final output is what rewards read.

    All agents of a run are the policy. Limits end the rollout as truncated; what else the library raises makes it
    failed.

    Attributes:
        agent: `my_agent.py:assistant` or `package.module:assistant`: an `agents.Agent`.
        parser: How calls of tools are written: `hermes`, `json`, `pythonic`, `qwen3_coder`, `glm`, `harmony`,
            `deepseek`, `mistral`, `llama3`, or `my_file.py:function` of one's own.
        max_turns: Of the library: answers of the model in one run.
        max_tokens: Of one answer; left out, the run's setting.
        timeout: Seconds until the rollout ends as truncated; left out, there is no limit.
    """

    scored_at_end: ClassVar[bool] = True

    agent: str
    parser: str = "hermes"
    max_turns: int = 10
    max_tokens: int | None = None
    timeout: float | None = None
    _agent: Any = attrs.field(init=False, eq=False, repr=False)
    _dialect: Dialect = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        import agents

        try:
            found = find(self.agent)
        except ValueFault as error:
            raise OptionError(NAME, [("agent", str(error))]) from error
        if not isinstance(found, agents.Agent):
            raise OptionError(NAME, [("agent", f"expected an agents.Agent, {self.agent} is a {type(found).__name__}")])
        object.__setattr__(self, "_agent", found)
        object.__setattr__(self, "_dialect", Dialect.named(self.parser, NAME))

    async def run(self, task: Task, chat: Chat) -> Sequence[Rollout]:
        """Let the agent work."""

        def work(served: Served) -> Any:
            return within(self.timeout, self._run(task, served))

        return await attended(chat, work, name=self.agent, dialect=self._dialect, max_tokens=self.max_tokens)

    async def _run(self, task: Task, served: Served) -> str:
        """The final output.

        Raises:
            LateError: The turns are used up.
        """
        import agents
        import openai

        # There is no TLS on this machine's own endpoint, and no proxy before it; reading certificates takes a while.
        http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
        made = openai.AsyncOpenAI(
            base_url=served.base_url, api_key=served.api_key, http_client=http, max_retries=0, timeout=None
        )
        async with made as client:
            model = agents.OpenAIChatCompletionsModel("policy", client)
            config = agents.RunConfig(model=model, tracing_disabled=True)
            try:
                result = await agents.Runner.run(self._agent, _input(task), run_config=config, max_turns=self.max_turns)
            except agents.MaxTurnsExceeded as error:
                raise LateError from error
        return str(result.final_output)


def _input(task: Task) -> Any:
    if isinstance(task.prompt, str):
        return task.prompt
    return [{"role": message.role, "content": message.content} for message in task.prompt]
