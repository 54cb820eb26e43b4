"""Tools of MCP servers: real servers, started as in a training."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.contracts import Sampling
from rlsdk.engines.client import GenerateRequest
from rlsdk.errors import ConfigError, EnvironmentFault, OptionError
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.generator import RolloutGenerator, first_error
from rlsdk.testing import ScriptedPolicy, run_workflow
from rlsdk.types import Group, Message, Rollout, Task
from tests.ports import free_port
from tests.rollout.codecs import chatml

SOURCE = '''
import os
import sys
from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("calc")

@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no luck")

@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def pid() -> int:
    """Tell the number of the process."""
    return os.getpid()

@server.tool()
def die() -> str:
    """Die."""
    os._exit(3)

if __name__ == "__main__":
    if sys.argv[1:]:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
'''


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SOURCE)
    return str(path)


def tasks(count: int) -> list[Task]:
    return [Task(id=f"t{i}", prompt=[Message("user", f"Question {i}.")]) for i in range(count)]


def talk(server: dict[str, Any], script: Any, *, count: int = 1, **options: Any) -> list[Group]:
    workflow = rlsdk.load("workflow", "tools", **{"tools": [], **options}, servers={"calc": server})
    return run_workflow(workflow, tasks(count), chatml(), script, max_tokens=500, max_length=9000)


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def results(rollout: Rollout) -> list[str]:
    return [m.content for m in rollout.messages if m.role == "tool"]


def test_a_conversation_with_a_server_that_is_started_here(program: str) -> None:
    said = iter([called("add", a=2, b=3) + called("add", a="x"), called("fail") + called("ad"), "5"])
    seen: list[str] = []

    def script(text: str) -> str:
        seen.append(text)
        return next(said)

    [group] = talk({"command": sys.executable, "args": [program], "only": ["add", "fail"]}, script)
    rollout = group.rollouts[0]
    right, wrong, failed, unknown = results(rollout)
    assert right == "5"
    assert "Input should be a valid integer" in wrong
    assert failed.startswith("error: ")
    assert unknown == "error: there is no tool 'ad', did you mean 'add'?; there are: add, fail"
    assert rollout.metrics["calls"] == 4
    assert rollout.metrics["failed_calls"] == 3
    assert rollout.text == "5"
    assert rollout.status == "finished"
    assert "add fail" in seen[0]  # the template shows the names of the tools


class Waiting(ScriptedPolicy):
    """Question 0 begins once question 1 has had a result, and question 1 continues once question 0 is over."""

    begun: asyncio.Event
    over: asyncio.Event

    async def sample(self, request: GenerateRequest) -> Any:  # type: ignore[override]
        text = self._codec.decode([request.prompt])[0]
        if "Question 0" in text:
            await self.begun.wait()
        elif "tool\n" in text:
            self.begun.set()
            await self.over.wait()
        return await super().sample(request)


def test_a_server_that_dies_costs_the_call_that_was_under_way_and_nothing_else(
    program: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = {
        "Question 0": iter([called("die"), called("add", a=1), "over"]),
        "Question 1": iter([called("add", a=2), called("add", a=3), "over"]),
    }
    server = {"command": sys.executable, "args": [program]}
    workflow = rlsdk.load("workflow", "tools", tools=[], servers={"calc": server}, call_timeout=60.0)
    policy = Waiting(chatml(), lambda text: next(next(own for name, own in said.items() if name in text)))

    async def play() -> list[Group]:
        policy.begun, policy.over = asyncio.Event(), asyncio.Event()

        async def run(task: Task, chat: Any) -> Rollout:
            rollout: Rollout = await workflow.run(task, chat)
            if task.id == "t0":
                policy.over.set()
            return rollout

        setting = RolloutContext(codec=chatml(), client=policy, sampling=Sampling(max_tokens=500), max_length=9000)
        return await RolloutGenerator(run, None, seed=0).produce(tasks(2), setting, 1, "test")

    dying, other = (group.rollouts[0] for group in asyncio.run(play()))
    assert results(dying) == ["error: die is not available: its server ended during the call", "2"]
    assert dying.metrics["failed_calls"] == 1
    assert results(other) == ["3", "4"]  # it had its tools from the server that died
    assert other.metrics["failed_calls"] == 0
    assert dying.status == other.status == "finished"
    assert caplog.text.count("MCP server 'calc' has ended") == 1


def test_a_server_that_is_killed_between_two_calls_is_not_missed(program: str) -> None:
    said = iter([called("pid"), called("pid"), called("pid"), "over"])
    pids: list[int] = []

    def script(text: str) -> str:
        if len(pids) < (seen := text.count("tool\n")):
            pids.append(int(text.rpartition("tool\n")[2].split()[0].removesuffix("<|im_end|>")))
            if seen == 1:
                os.kill(pids[0], signal.SIGKILL)
        return next(said)

    [group] = talk({"command": sys.executable, "args": [program]}, script, call_timeout=60.0)
    rollout = group.rollouts[0]
    before, after, last = map(int, results(rollout))
    assert before != after == last
    assert rollout.metrics["failed_calls"] == 0
    assert rollout.status == "finished"


def test_a_server_that_cannot_be_used_stops_the_run(program: str) -> None:
    with pytest.raises(EnvironmentFault, match=r"(?s)MCP server 'calc'.*it printed.*No such file"):
        raise_first({"command": sys.executable, "args": [program + "x"]})
    with pytest.raises(EnvironmentFault, match="has no tool subtract; it has: add, fail, pid, die"):
        raise_first({"command": sys.executable, "args": [program], "only": ["subtract"]})
    file = Path(program).with_name("own.py")
    file.write_text("def add(a: int) -> int:\n    '''Add.'''\n    return a\n")
    with pytest.raises(ConfigError, match="several tools are named add"):
        raise_first({"command": sys.executable, "args": [program]}, tools=[f"{file}:add"])


def raise_first(server: dict[str, Any], **options: Any) -> None:
    try:
        talk(server, lambda _: "", **options)
    except ExceptionGroup as group:
        raise first_error(group) from None


def test_a_server_at_an_address(program: str) -> None:
    port = free_port()
    with subprocess.Popen([sys.executable, program, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(port)
            said = iter([called("add", a=20, b=3), "23"])
            [group] = talk({"url": f"http://127.0.0.1:{port}/mcp"}, lambda _: next(said))
        finally:
            process.kill()
    assert results(group.rollouts[0]) == ["23"]


def wait_for(port: int) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError


@pytest.mark.parametrize(
    ("server", "fault"),
    [
        ({}, "servers.calc: expected either `command`"),
        ({"command": "python", "url": "http://x"}, "servers.calc: expected either `command`"),
        ({"url": "localhost:80"}, "servers.calc: url: expected http"),
        ({"command": "no-such-program"}, "servers.calc: command: there is no program 'no-such-program'"),
        ({"comand": "python"}, "servers.calc.comand"),
    ],
)
def test_faults_are_found_before_anything_starts(server: dict[str, Any], fault: str) -> None:
    with pytest.raises(OptionError) as caught:
        rlsdk.load("workflow", "tools", tools=[], servers={"calc": server})
    assert fault in str(caught.value)
