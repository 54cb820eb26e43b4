"""Helpers of all tests: distributions created for a test; tests marked `gpu` are skipped without a GPU."""

from __future__ import annotations

import gc
import importlib
import inspect
import itertools
import logging
import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

from tests.examples import many

# A call that comes after a test has ended its Ray fails then, and does not start another for all tests that follow.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
# Torch asks for the name of each address that it connects; where no name server answers, that would take 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# `nohup`, and a shell that runs the tests in the background, ignore these, and so would all processes of the tests.
for ignored, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, handler)

# No deadline: these machines are shared, and a test that is slow there is not wrong.
settings.register_profile("rlsdk", deadline=None, max_examples=many(200))
settings.load_profile("rlsdk")


LONGEST = (
    "tests/run/test_quickstart.py",
    "tests/learners/",
    "tests/engines/",
    "tests/run/test_training.py",
    "plugins/rlsdk-fsdp2/",
)
"""What is begun with among the tests that start the stack, so that both processes end together."""
SHARING = ("tests/learners", "tests/engines")
"""Folders whose tests share Ray, engines and ranks: one process runs all of them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, give the files of a folder that shares processes to one process."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadFolderScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = nodeid.rpartition("/")[0]
            return folder if folder in SHARING else super()._split_scope(nodeid)

    return LoadFolderScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude the tests and the modules they import from garbage collection: millions of objects that stay to the end.

    A complete collection would otherwise take half a second, and some of the code under test asks for one.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Exclude what tests have imported since, such as torch and transformers, from garbage collection as well."""
    global MODULES  # noqa: PLW0603 - one count for the process
    yield
    if nextitem is not None and nextitem.path != item.path and len(sys.modules) > MODULES + 200:
        gc.collect()
        gc.freeze()
        MODULES = len(sys.modules)


MODULES = 0
"""Number of modules whose objects are excluded from garbage collection."""


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("property")

    starting = {item.path for item in items if item.get_closest_marker("stack")}

    def rank(item: pytest.Item) -> tuple[bool, int, bool]:
        # Ray stays in a process that has started it: files that start nothing come first, in a folder that shares, too.
        longest = next((i for i, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST))
        starts = item.path in starting
        return starts or item.nodeid.startswith(SHARING), longest, starts

    items.sort(key=rank)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


FOLDERS = itertools.count()
"""Numbers of the folders of tests, one for each in this process."""


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test: pytest's own looks through those of all earlier tests for its number."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    return tmp_path_factory.mktemp(f"{name}_{next(FOLDERS)}", numbered=False)


@pytest.fixture
def gridworlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin of FrozenLake as pip would have installed it; where it stands is on the path already."""
    from rlsdk.testing import find_plugins_again

    pytest.importorskip("gymnasium")
    info = tmp_path / "rlsdk_gridworlds-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlsdk-gridworlds\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[rlsdk.v1]\ngridworlds = rlsdk_gridworlds\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    find_plugins_again()
    yield
    find_plugins_again()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test in virtual time: it sleeps and waits without delay, and alike on any machine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    from rlsdk.simulation.clock import run_virtually

    run_virtually(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.fixture(autouse=True)
def package_log() -> Iterator[None]:
    """Give the package's logger back as a program finds it: a command that a test called sent it to its own console.

    Where it does not propagate, pytest adds its handlers to it as well, and `caplog` holds a message twice.
    """
    yield
    logger = logging.getLogger("rlsdk")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        if type(handler) is logging.FileHandler:  # a run's own; pytest's are of another class
            handler.close()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Ray, on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    if ray.is_initialized():  # tests of other folders may share it
        yield
        return
    # `local`: never the cluster that another program, or another test, left to be found.
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


class Site:
    """A folder on `sys.path` with distributions as pip installs them: modules and metadata."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self,
        distribution: str,
        files: Mapping[str, str] | None = None,
        *,
        version: str = "1.0",
        plugins: Mapping[str, str] | None = None,
        commands: Mapping[str, str] | None = None,
        group: str = "rlsdk.v1",
    ) -> None:
        """Write a distribution: its files, and its entry points for plugins (in a group) and commands."""
        groups = {group: plugins or {}, "rlsdk.v1.commands": commands or {}}
        declared = "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
            for group, points in groups.items()
        )
        info = f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        own = {f"{info}/METADATA": metadata, f"{info}/entry_points.txt": declared}
        for name, text in {**own, **(files or {})}.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Distributions of one test; modules imported from them are unloaded afterwards."""
    from rlsdk.plugins import fingerprints
    from rlsdk.testing import find_plugins_again

    def forget() -> None:
        find_plugins_again()
        fingerprints._package_hash.cache_clear()

    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    forget()
    yield Site(folder)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]
    forget()
