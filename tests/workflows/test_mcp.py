"""Tools of MCP servers: real servers, started as a training starts them."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.errors import ConfigError, EnvironmentFault, OptionError
from rlsdk.rollout.producer import first_error
from rlsdk.testing import run_workflow
from rlsdk.types import Group, Message, Rollout, Task
from tests.rollout.codecs import chatml

SOURCE = '''
import os
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("calc")

@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no luck")

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


def test_a_server_that_ends_fails_its_rollout_and_is_started_again(program: str) -> None:
    calls: list[str] = []

    def script(text: str) -> str:
        if "tool\n" in text:
            return "done"
        calls.append(text)
        return called("die") if len(calls) == 1 else called("add", a=len(calls))

    server = {"command": sys.executable, "args": [program]}
    workflow = rlsdk.load("workflow", "tools", tools=[], servers={"calc": server})

    over = asyncio.Event()

    async def one_after_the_other(task: Task, chat: Any) -> Rollout:
        if task.id == "t1":
            await over.wait()
        try:
            return await workflow.run(task, chat)
        finally:
            over.set()

    lost, found = run_workflow(one_after_the_other, tasks(2), chatml(), script, max_tokens=500, max_length=9000)
    assert lost.rollouts[0].status == "failed"
    assert not lost.scores[0].valid
    assert "MCP server 'calc', tool 'die'" in lost.scores[0].reason
    assert results(found.rollouts[0]) == ["3"]
    assert found.scores[0].valid


def test_a_server_that_cannot_be_used_stops_the_run(program: str) -> None:
    with pytest.raises(EnvironmentFault, match=r"(?s)MCP server 'calc'.*it printed.*No such file"):
        raise_first({"command": sys.executable, "args": [program + "x"]})
    with pytest.raises(EnvironmentFault, match="has no tool subtract; it has: add, fail, die"):
        raise_first({"command": sys.executable, "args": [program], "only": ["subtract"]})
    file = Path(program).with_name("own.py")
    file.write_text("def add(a: int) -> int:\n    '''Add.'''\n    return a\n")
    with pytest.raises(ConfigError, match="two tools are called add"):
        raise_first({"command": sys.executable, "args": [program]}, tools=[f"{file}:add"])


def raise_first(server: dict[str, Any], **options: Any) -> None:
    try:
        talk(server, lambda _: "", **options)
    except ExceptionGroup as group:
        raise first_error(group) from None


def test_a_server_at_an_address(program: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
