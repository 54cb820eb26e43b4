"""Settings of a run's processes."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import ExitStack

import pytest

from rlsdk.isolation.process import importing, interrupts_kept, sigterm_as_interrupt


def test_no_garbage_is_looked_for_while_importing() -> None:
    try:
        with importing():
            assert not gc.isenabled()
        assert gc.isenabled()
        with pytest.raises(ImportError), importing():
            raise ImportError
        assert gc.isenabled()
        gc.disable()
        with importing():
            pass
        assert not gc.isenabled()  # as whoever called had it
    finally:
        gc.enable()
        gc.unfreeze()


def test_a_script_is_interrupted_and_its_blocks_are_left():
    code = """
        import signal, time
        from rlsdk.isolation.process import sigterm_as_interrupt
        try:
            with sigterm_as_interrupt():
                print("ready", flush=True)
                time.sleep(1000)
        finally:
            print("left", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        shown, errors = process.communicate(timeout=30)
    assert shown == "left True\n" and errors.endswith("KeyboardInterrupt\n")


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM"])
def test_an_interrupt_during_a_fork_is_raised_after_it(sent: str) -> None:
    """Python prints and ignores what the hook of a fork raises."""
    code = f"""
        import os, signal, subprocess
        from rlsdk.isolation.process import interrupts_kept, sigterm_as_interrupt
        signals = [signal.{sent}]
        os.register_at_fork(before=lambda: signals and signal.raise_signal(signals.pop()))
        with sigterm_as_interrupt():
            with interrupts_kept():
                subprocess.run(["true"], preexec_fn=lambda: None, check=True)
                print("the block ends", flush=True)
            print("lost", flush=True)
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code)]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ended.stdout == "the block ends\n" and ended.stderr.endswith("KeyboardInterrupt\n"), ended.stderr


def test_an_interrupt_that_a_failure_hides_is_raised_and_a_handler_of_the_program_is_left_alone() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise OSError from None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with interrupts_kept():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_a_handler_of_the_program_stays():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("own"))
    try:
        with sigterm_as_interrupt():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == ["own"]


def test_a_handler_that_is_installed_meanwhile_stays():
    def own(*_): ...

    try:
        with sigterm_as_interrupt():
            signal.signal(signal.SIGTERM, own)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_block_that_another_thread_leaves_costs_no_error():
    with ExitStack() as stack:
        stack.enter_context(sigterm_as_interrupt())
        thread = threading.Thread(target=stack.pop_all().close)
        failed = []
        before, threading.excepthook = threading.excepthook, failed.append
        try:
            thread.start()
            thread.join()
        finally:
            threading.excepthook = before
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert not failed


def test_a_thread_other_than_the_main_one_is_left_alone():
    failed = []

    def work():
        try:
            with sigterm_as_interrupt():
                pass
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed


def test_the_interrupt_is_that_of_ctrl_c():
    with sigterm_as_interrupt(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_a_native_handler_in_front_of_the_programs_own_is_removed():
    code = """
        import ctypes, signal
        from rlsdk.isolation.process import restore_sigterm, sigterm_as_interrupt
        with sigterm_as_interrupt():
            ctypes.CDLL(None).signal(signal.SIGTERM, None)  # as a library does; Python still believes in its handler
            restore_sigterm()
            signal.raise_signal(signal.SIGTERM)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30, check=False
    )
    assert ran.stderr.endswith("KeyboardInterrupt\n")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")
def test_memory_is_limited_but_not_by_mapped_files(tmp_path):
    code = """
        import mmap, sys
        from rlsdk.isolation.process import limit_memory
        limit_memory(256 << 20)
        with open(sys.argv[1], "wb+") as file:
            file.truncate(4 << 30)  # as large as the libraries of CUDA, and without content
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        print(len(mapped), len(bytearray(128 << 20)))
        try:
            bytearray(512 << 20)
        except MemoryError:
            print("refused")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "file")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(4 << 30), str(128 << 20), "refused"]
