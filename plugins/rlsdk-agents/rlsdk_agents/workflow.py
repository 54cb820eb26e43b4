"""Run an agent of the OpenAI Agents SDK with the policy in place of its models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs

import rlsdk
from rlsdk.contracts import Chat, Served
from rlsdk.errors import OptionError, ValueFault
from rlsdk.kit import Dialect, LateError, attended, find, within
from rlsdk.limits import Count, Positive
from rlsdk.types import Image, Message, Rollout, Task

NAME = "workflow 'agents/workflow'"


@rlsdk.workflow("workflow")
@attrs.frozen(kw_only=True)
class AgentsWorkflow:
    """Run an agent, with its tools and handoffs, on the task's prompt; rewards read its final output.

    The policy replaces all models of the run. If a limit is hit, the rollout is truncated. If the library ends the run
    for what the policy wrote (`ModelBehaviorError`: a call of an unknown tool, or an output that does not fit the
    agent's type), rewards read the policy's last answer, so that it learns from the mistake; after any other exception,
    the rollout has failed. Metric: `model_errors`, 1 after such a mistake.

    Attributes:
        agent: An `agents.Agent`, as `my_agent.py:assistant` or `package.module:assistant`.
        parser: Syntax of tool calls: the name of a `tool_parser`, or your own `my_file.py:function`; by default, the
            syntax of the model's chat template.
        max_turns: Maximum number of answers in one run, enforced by the library.
        max_tokens: Maximum tokens of an answer; by default, the run's setting.
        timeout: Seconds after which the rollout is truncated; by default, there is no limit.
    """

    scored_at_end: ClassVar[bool] = True

    agent: str
    parser: str | None = None
    max_turns: Count = 10
    max_tokens: Count | None = None
    timeout: Positive | None = None
    _agent: Any = attrs.field(init=False, eq=False, repr=False)
    _dialect: Dialect | None = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        import agents

        try:
            found = find(self.agent)
        except ValueFault as error:
            raise OptionError(NAME, [("agent", str(error))]) from error
        if not isinstance(found, agents.Agent):
            raise OptionError(
                NAME, [("agent", f"expected an agents.Agent; {self.agent} is of type {type(found).__name__}")]
            )
        object.__setattr__(self, "_agent", found)
        object.__setattr__(self, "_dialect", None if self.parser is None else Dialect.named(self.parser, NAME))

    async def run(self, task: Task, chat: Chat) -> Sequence[Rollout]:
        """Run the agent against an endpoint."""

        def work(served: Served) -> Any:
            return within(self.timeout, self._run(task, served))

        return await attended(chat, work, name=self.agent, dialect=self._dialect, max_tokens=self.max_tokens)

    async def _run(self, task: Task, served: Served) -> dict[str, Any]:
        """Run the agent and return its final output as the answer; a typed output becomes JSON.

        Raises:
            LateError: The maximum number of turns was reached.
        """
        import agents
        import openai
        import pydantic_core

        # The local endpoint has neither TLS nor a proxy; reading certificates takes a while.
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
            except agents.ModelBehaviorError:
                return {"model_errors": 1.0}
        output = result.final_output
        text = output if isinstance(output, str | None) else pydantic_core.to_json(output, fallback=str).decode()
        return {"answer": text, "model_errors": 0.0}


def _input(task: Task) -> Any:
    if isinstance(task.prompt, str):
        return task.prompt
    return [{"role": message.role, "content": _content(message)} for message in task.prompt]


def _content(message: Message) -> Any:
    if isinstance(message.content, str):
        return message.content
    return [
        {"type": "input_image", "image_url": part.url, "detail": "auto"}
        if isinstance(part, Image)
        else {"type": "input_text", "text": part}
        for part in message.content
    ]
