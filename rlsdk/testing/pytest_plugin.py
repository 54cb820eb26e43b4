"""Pytest plugin: `pytest --rlsdk-plugin NAME` checks the components of a plugin, with one test per property.

Pytest loads this in every project of an environment with rlsdk. So it imports nothing, and does nothing unless the
option is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ITEMS = "rlsdk-conformance"
"""Name under which the plugin that creates the tests is registered."""


class Hooks:
    """The hooks as an object, since the entry point and `-p` may both register it."""

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        """Add the options, once."""
        group = parser.getgroup("rlsdk", "conformance of rlsdk plugins")
        if any("--rlsdk-plugin" in option.names() for option in group.options):
            return
        group.addoption(
            "--rlsdk-plugin",
            action="append",
            default=[],
            metavar="NAME",
            help="check the components of this plugin (a name or a file), and run no other tests except those of files "
            "named on the command line; may be repeated",
        )
        group.addoption(
            "--rlsdk-option",
            action="append",
            default=[],
            metavar="COMPONENT.OPTION=VALUE",
            help="check a component with this option; may be repeated",
        )
        group.addoption(
            "--rlsdk-task",
            action="append",
            default=[],
            metavar="YAML",
            help="""a task that the plugin's rewards can score, such as '{prompt: "1 + 1?", answer: 2}'; repeatable""",
        )

    def pytest_configure(self, config: pytest.Config) -> None:
        """Register the plugin that creates the tests, once, if requested."""
        if config.getoption("--rlsdk-plugin") and not config.pluginmanager.has_plugin(ITEMS):
            from rlsdk.testing.pytest_items import Conformance

            config.pluginmanager.register(Conformance(config), ITEMS)


hooks = Hooks()
pytest_addoption = hooks.pytest_addoption
pytest_configure = hooks.pytest_configure
