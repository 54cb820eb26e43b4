"""Signals reach a run whatever its event loop does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from rlsdk.loops.signals import handled, on_interrupt

BLOCKED = """
    import asyncio, time
    from rlsdk.loops.signals import handled

    async def block():
        with handled("finishing", print):
            {wait}
    asyncio.run(block())
"""


def start(wait: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(BLOCKED).format(wait=wait)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "blocked\n"
    return process


def send(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to a process once it sleeps: Python overlooks one that comes just before it calls `sleep`."""
    end = time.monotonic() + 30
    while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_a_process_whose_loop_is_blocked(number):
    process = start("print('blocked', flush=True); time.sleep(1000)")
    send(process, number)
    assert process.stderr.readline() == "finishing\n"  # said though the loop cannot run
    send(process, number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0 and "KeyboardInterrupt" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_is_told_of_each_signal_and_not_interrupted(number: signal.Signals) -> None:
    async def serve() -> int:
        told = asyncio.Queue[None]()
        on_interrupt(lambda: told.put_nowait(None))
        for _ in range(2):
            os.kill(os.getpid(), number)
            await asyncio.wait_for(told.get(), 30)
        return told.qsize()

    assert asyncio.run(serve()) == 0


def test_the_third_signal_ends_even_code_that_catches_interrupts():
    wait = """while True:
                try:
                    print("blocked", flush=True)
                    time.sleep(1000)
                except BaseException as error:
                    print(type(error).__name__, flush=True)"""
    process = start(wait)
    send(process, signal.SIGINT)
    assert process.stderr.readline() == "finishing\n"
    send(process, signal.SIGINT)
    assert process.stdout.readline() == "KeyboardInterrupt\n"
    send(process, signal.SIGINT)
    assert process.wait(timeout=30) == 130


def test_the_first_signal_and_usr1_call_the_run_in_its_loop_and_leave_no_handler():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}

    async def work() -> list[str]:
        heard: asyncio.Queue[str] = asyncio.Queue()
        with handled("finishing", lambda: heard.put_nowait("end"), lambda: heard.put_nowait("save")):
            signal.raise_signal(signal.SIGUSR1)
            first = await asyncio.wait_for(heard.get(), 10)
            signal.raise_signal(signal.SIGTERM)
            return [first, await asyncio.wait_for(heard.get(), 10)]

    start = time.monotonic()
    runner = asyncio.Runner()
    with runner:
        during = runner.run(work())
    assert during == ["save", "end"] and time.monotonic() - start < 20
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize(("before", "heard"), [(signal.default_int_handler, ["end"]), (signal.SIG_IGN, [])])
def test_a_terminal_that_closes_ends_the_run_after_its_step_unless_nohup_protects_it(
    before, heard, monkeypatch: pytest.MonkeyPatch
):
    async def work() -> list[str]:
        ends: list[str] = []
        with handled("finishing", lambda: ends.append("end")):
            for _ in range(3):  # from the kernel and from the shell
                signal.raise_signal(signal.SIGHUP)
            await asyncio.sleep(0)
        return ends

    reading, writing = os.pipe()
    os.close(reading)
    shell = signal.signal(signal.SIGHUP, before)
    try:
        with os.fdopen(writing, "w") as closed:
            monkeypatch.setattr(sys, "__stderr__", closed)
            assert asyncio.run(work()) == heard
    finally:
        signal.signal(signal.SIGHUP, shell)


HANG_UP = """
import os, signal, time
from rlsdk import cli

def command(**_):
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(20)
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGHUP)  # the kernel and the shell send one each
        print("cleaned up", flush=True)
        raise SystemExit(130)
    raise SystemExit(0)

cli.root.main, time.sleep = command, lambda seconds: None
cli.main()
"""


@pytest.mark.parametrize(("before", "said"), [("SIG_DFL", "cleaned up"), ("SIG_IGN", "")])
def test_a_terminal_that_closes_ends_a_command_like_ctrl_c_unless_nohup_protects_it(before, said):
    program = f"import signal; signal.signal(signal.SIGHUP, signal.{before})\n{HANG_UP}"
    ran = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout.strip()) == (130 if said else 0, said), ran.stderr
