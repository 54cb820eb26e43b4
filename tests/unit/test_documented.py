"""Every command line and every configuration of the pages is accepted by the command line's parser and by the schema.

Which YAML blocks are configurations: all of them, but those below a line `<!-- not a configuration: WHAT IT IS -->`.
A block may show a part of a configuration, so that required keys may be missing; unknown ones may not be there.
Words in capitals, such as CONFIG or NAME, stand for values of the reader's.
"""

from __future__ import annotations

import contextlib
import re

import click
import pytest
import yaml
from jsonschema import Draft7Validator
from jsonschema.exceptions import best_match
from omegaconf import OmegaConf

from rlsdk.cli import COMMANDS, root
from rlsdk.cli.config import offered
from rlsdk.cli.parameters import SettingsCommand
from rlsdk.config.json_schema import json_schema
from rlsdk.plugins import CORE, Plugins
from rlsdk.testing.conformance import read_tasks
from tests.unit.documented import PAGES, ROOT, Command, blocks, commands, configs, shell_commands, spelled_out

PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*(x[A-Z]+)?$")
NOT_A_CONFIG = re.compile(r"<!-- not a configuration: .+ -->")
PATHS = [page.relative_to(ROOT).as_posix() for page in PAGES]


@pytest.fixture(scope="module")
def schema():
    found = json_schema(offered(Plugins(), [CORE]))
    for section in [found, *found["properties"].values()]:
        for arm in section.get("anyOf", [section]):
            arm.pop("required", None)
    return Draft7Validator(found)


@pytest.fixture
def parse(monkeypatch):
    """Parse a command line without running it; files need not exist, and placeholders have any type."""
    convert = click.ParamType.__call__

    def lenient(kind, value, param=None, ctx=None):
        stands_for_a_value = isinstance(value, str) and PLACEHOLDER.match(value)
        return value if stands_for_a_value or isinstance(kind, click.Path) else convert(kind, value, param, ctx)

    monkeypatch.setattr(click.ParamType, "__call__", lenient)

    def of(command: Command) -> tuple[click.Command, click.Context]:
        found: click.Command = root
        context = click.Context(root, info_name="rlsdk")
        words = list(command.words)
        while isinstance(found, click.Group) and words and not words[0].startswith("-"):
            if PLACEHOLDER.match(words[0]):  # `rlsdk COMMAND --help`
                return found, context
            name, child, words = found.resolve_command(context, words)
            if child is None:
                raise click.UsageError(f"no such command {name!r}")
            found, context = child, click.Context(child, context, info_name=name, **child.context_settings)
        if words or not command.mentioned:
            with contextlib.suppress(click.exceptions.Exit):  # --help, --version
                found.parse_args(context, words)
        return found, context

    return of


@pytest.mark.parametrize("page", PAGES, ids=PATHS)
def test_each_command_line_of_a_page_is_understood(page, parse, schema):
    faults = []
    for command in commands(page):
        try:
            found, context = parse(command)
        except (click.MissingParameter, click.BadOptionUsage) as error:
            if not command.mentioned or isinstance(error, click.NoSuchOption):  # a mention may leave out values
                faults.append(f"{command}: {error.format_message()}")
        except click.UsageError as error:
            faults.append(f"{command}: {error.format_message()}")
        else:
            if isinstance(found, SettingsCommand):
                faults += [
                    f"{command}: {fault}"
                    for fault in setting_faults(schema, context.params, swept=found.name == "sweep")
                ]
            elif context.params.get("tasks"):  # of `rlsdk check`
                read_tasks(context.params["tasks"])
    assert faults == []


def setting_faults(schema, parameters, *, swept: bool) -> list[str]:
    """Faults of the settings `KEY=VALUE` of a command line; of a sweep's `KEY=a,b`, the first value counts."""
    given = [str(word) for word in parameters.get("settings") or ()]
    settings = [re.sub(r"=(log:)?([^\[{,:]+)[,:].*", r"=\2", word) if swept else word for word in given]
    settings = [word for word in settings if not re.match(r"(KEY|key)=", word)]
    unknown = [f"not a setting: {word!r}" for word in settings if "=" not in word and not PLACEHOLDER.match(word)]
    tree = OmegaConf.to_container(OmegaConf.from_dotlist([word for word in settings if "=" in word]))
    return unknown + faults_of(schema, tree)


def faults_of(schema, tree) -> list[str]:
    """Faults of a part of a configuration."""
    return [
        f"{'.'.join(map(str, (best_match([error]) or error).absolute_path))}: {(best_match([error]) or error).message}"
        for error in schema.iter_errors(tree)
    ]


@pytest.mark.parametrize("page", PAGES, ids=PATHS)
def test_each_configuration_of_a_page_has_known_keys_and_values(page, schema):
    faults = []
    for block in blocks(page):
        if block.language in ("yaml", "yml") and not NOT_A_CONFIG.search(block.above):
            try:
                faults += [f"{block}: {fault}" for tree in configs(block) for fault in faults_of(schema, tree)]
            except yaml.YAMLError as error:
                faults.append(f"{block}: {error}")
    assert faults == []


def test_the_pages_start_no_second_run_in_the_folder_of_the_quickstart():
    """A reader who has run the quickstart types the next command, which a folder that holds a run would refuse."""
    shown = [command for page in PAGES for command in commands(page) if not command.mentioned]
    runs = [command for command in shown if command.words[:2] == ("train", "examples/quickstart.yaml")]
    assert len(runs) > 5
    free = ("name=", "--overwrite", "--resume", "--mode")
    assert [str(command) for command in runs if not any(word.startswith(free) for word in command.words)] == []


def test_the_tasks_that_help_and_messages_show_can_be_read():
    files = [file for file in (ROOT / "rlsdk").rglob("*.py") if "{prompt: " in file.read_text(encoding="utf-8")]
    shown = [task for file in files for task in re.findall(r"'(\{prompt: .*?\})'", file.read_text(encoding="utf-8"))]
    assert len(read_tasks(shown)) == len(shown) >= 3


def test_the_pages_show_every_command():
    """The collector finds all commands: each is on some page, with arguments."""
    shown = {command.words[0] for page in PAGES for command in commands(page) if len(command.words) > 1}
    assert set(COMMANDS) - shown - {"doctor"} == set()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian CONFIG", "No such command 'trian'"),
        ("train CONFIG --resum", "No such option"),
        ("recipe rum NAME", "No such command"),
        ("train CONFIG --mode sideways", "is not one of"),
        ("export RUN", "Missing"),
        ("rollouts RUN --limit many", "many"),
    ],
)
def test_a_wrong_command_line_is_found(words, message, parse):
    with pytest.raises(click.UsageError, match=message):
        parse(Command("page:1", tuple(words.split()), mentioned=False))


@pytest.mark.parametrize("text", ["stpes: 3", "rollout: {max_stale: 1}", "learner: {lrr: 1.0}", "algorithm: gprp"])
def test_a_wrong_configuration_is_found(text, schema):
    assert faults_of(schema, yaml.safe_load(text))


def test_what_a_shell_block_calls():
    text = "$ N=2 .venv/bin/rlsdk train a.yaml x=1 \\\n --json > out  # how\ncd x && rlsdk doctor | wc\nrlsdk2 x\n"
    assert list(shell_commands(text)) == [("train", "a.yaml", "x=1", "--json"), ("doctor",)]


def test_what_a_usage_line_stands_for():
    assert spelled_out(r"rlsdk recipe list\|show NAME [--quick]") == [
        "rlsdk recipe list NAME --quick",
        "rlsdk recipe show NAME --quick",
    ]
