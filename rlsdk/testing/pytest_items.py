"""Pytest tests of the conformance suite: one per property and component."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from rlsdk.errors import ConformanceFault, RlsdkError
from rlsdk.plugins import Plugins
from rlsdk.testing.conformance import Check, checks, read_options, read_tasks


class Conformance:
    """Collect the tests of the plugins named on the command line."""

    def __init__(self, config: pytest.Config) -> None:
        self._names: list[str] = config.getoption("--rlsdk-plugin")
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args = []  # no file was given: check only the plugin

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add the components to the session's collection."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed:
            report.result.extend(self._components(collector))
        return report

    def _components(self, session: pytest.Session) -> list[ComponentNode]:
        found = []
        option = session.config.getoption
        try:
            given: dict[str, Any] = {
                "options": read_options(option("--rlsdk-option")),
                "tasks": read_tasks(option("--rlsdk-task")),
            }
            for name in self._names:
                components, broken = checks(Plugins(), name, **given)
                if broken:
                    raise pytest.UsageError(f"--rlsdk-plugin {name}: {'; '.join(broken.values())}")
                found += [ComponentNode.from_parent(session, check=check) for check in components]
        except RlsdkError as error:
            raise pytest.UsageError(f"--rlsdk-plugin: {error}") from error
        return found


class ComponentNode(pytest.Collector):
    """A component: `mylab/soft_clip[policy_loss]`."""

    def __init__(self, *, check: Check, **given: Any) -> None:
        subject = check.subject
        name = f"{subject.name}[{subject.component.kind}]"
        super().__init__(name=name, nodeid=name, path=_source(subject.component.obj), **given)
        self.check = check

    def collect(self) -> list[PropertyItem]:
        """Return a test for each property of the component."""
        return [PropertyItem.from_parent(self, name=name) for name in self.check.properties]


class PropertyItem(pytest.Item):
    """A property of a component: `mylab/soft_clip[policy_loss]::micro-batches`."""

    def runtest(self) -> None:
        """Check it."""
        assert isinstance(self.parent, ComponentNode)
        finding = self.parent.check.finding(self.name)
        if finding.outcome == "skipped":
            pytest.skip(finding.reason)
        if finding.fault is not None:
            raise finding.fault

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return only the message, since the traceback would show the suite."""
        if isinstance(excinfo.value, ConformanceFault):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Location of the component, for pytest's report."""
        assert isinstance(self.parent, ComponentNode)
        line: int | None = None
        with contextlib.suppress(OSError, TypeError):  # an object without a source file
            line = inspect.getsourcelines(self.parent.check.subject.component.obj)[1] - 1
        return self.path, line, f"{self.parent.name} {self.name}"


def _source(obj: Any) -> Path:
    try:
        return Path(inspect.getsourcefile(obj) or "")
    except TypeError:  # defined in an interpreter, or in a plugin file
        return Path(getattr(inspect.getmodule(obj), "__file__", None) or ".")
