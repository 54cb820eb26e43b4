"""The command line for users: help, exit statuses, messages; commands of plugins."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from rlsdk.cli import COMMANDS, READS_MODELS, root
from rlsdk.cli.eval import _prepare as prepare
from rlsdk.errors import ConfigError
from rlsdk.kinds import KINDS, OTHER_NAMES

HELLO = """
    import click

    @click.command()
    @click.argument("name")
    def hello(name):
        '''Say hello.'''
        click.echo(f"hello {name}")

    def plain(): ...

    @click.command()
    def doomed():
        from rlsdk.errors import ConfigError, RunError
        raise {error}
"""


def run(*arguments, **options):
    return CliRunner().invoke(root, arguments, **options)


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "rlsdk", "plugins", "kl", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and ran.stdout == run("plugins", "kl", "--json").stdout
    wrong = subprocess.run([*command[:3], "pluginz"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "Usage: rlsdk " in wrong.stderr


def start(*arguments, **options):
    command = [sys.executable, "-m", "rlsdk.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_help_lists_every_command_and_loads_none():
    text = start("--help").stdout
    for name, summary in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary.split(';')[0][:40])}", text, re.MULTILINE), name


def help_pages(command: click.Command, context: click.Context) -> dict[str, str]:
    """Return the help of a command and of all commands below it."""
    pages = {context.command_path: command.get_help(context)}
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        below = command.get_command(context, name)
        pages |= help_pages(below, click.Context(below, info_name=name, parent=context))
    return pages


def test_help_names_what_an_option_takes_and_says_the_same_of_the_same_option():
    context = click.Context(root, info_name="rlsdk", max_content_width=120)
    pages = help_pages(root, context)
    assert len(pages) > len(COMMANDS) + 20, "the commands below data, debug, model, new and recipe are among them"
    vague = re.compile(r"^  -.* (?:INTEGER|FLOAT|TEXT|DIRECTORY)\b.*|^  [\w-]+  .*\w\.\.\.$", re.MULTILINE)
    assert not {path: found for path, page in pages.items() if (found := vague.findall(page))}
    own = {"rlsdk diagnose", "rlsdk export"}  # the file has another purpose there
    options = {path: re.search(r"--plugin FILE +(.*?; repeatable)", page, re.DOTALL) for path, page in pages.items()}
    assert len({" ".join(found[1].split()) for path, found in options.items() if found and path not in own}) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_in_the_module_of_its_name(name):
    attribute = name.replace("-", "_")
    command = getattr(importlib.import_module(f"rlsdk.cli.{attribute}"), attribute)
    assert isinstance(command, click.Command)
    assert command.name == name
    assert command.help
    assert run(name, "--help").exit_code == 0


def test_the_version_is_the_distributions():
    from rlsdk.plugins import version

    assert run("--version").output == f"rlsdk {version()}\n"


@pytest.mark.skipif(os.name == "nt", reason="counts the processor time of children")
@pytest.mark.parametrize("arguments", [["--help"], ["plugins"]], ids=str)
def test_light_commands_answer_in_a_fraction_of_a_second(arguments):
    """In processor time, which other tests on the same cores do not change; importing torch alone takes longer."""
    import resource

    def spent():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    start(*arguments)  # compiles what was not compiled yet
    before = spent()
    assert start(*arguments).returncode == 0
    assert spent() - before < 0.8


def test_a_wrong_command_is_answered_with_the_nearest():
    ran = run("trian")
    assert ran.exit_code == 2
    assert "No such command 'trian'. Did you mean 'train'?" in ran.output
    assert "No such kind 'loss'. Did you mean 'policy_loss'?" in run("new", "loss").output
    assert not OTHER_NAMES.keys() & set(KINDS)
    assert "No such kind 'filtr'. Did you mean 'filter'?" in run("new", "filtr").output
    assert "There are: advantage, algorithm," in run("new", "zzz").output
    assert "There are: check, compare, config, data, debug, diagnose, doctor, engines, eval" in run("zzz").output


@pytest.mark.parametrize("command", ["train", "explain"])
def test_settings_with_dashes_are_explained(command):
    ran = run(command, "a.yaml", "--batch_size=4")
    assert ran.exit_code == 2
    assert "No such option '--batch_size'" in ran.output
    assert "Settings have no dashes: batch_size=…" in ran.output


def test_an_option_of_another_command_is_answered_with_that_command():
    answered = run("explain", "a.yaml", "--resume").output
    assert "It is an option of `rlsdk train`." in " ".join(answered.split()), answered
    assert "have no dashes" not in answered
    assert "Settings have no dashes: steps=…; write steps=3" in run("train", "a.yaml", "--steps", "3").output


def test_a_broken_command_of_a_plugin_does_not_hide_whose_option_was_given(site):
    site.install("lab", {"labcli.py": "raise OSError('no licence')"}, commands={"broken": "labcli:broken"})
    answered = run("explain", "a.yaml", "--resume").output
    assert "It is an option of `rlsdk train`." in " ".join(answered.split()), answered


def test_a_mistyped_option_is_answered_with_the_option():
    assert "Did you mean '--resume'?" in run("train", "a.yaml", "--resum").output
    assert "have no dashes" not in run("train", "a.yaml", "--resum").output


@pytest.mark.parametrize(
    ("content", "ours"),
    [
        (("logs/engine-0.log", "cache/a"), True),
        (("logs/engine-0.log",), True),
        (("logs/a", "pictures/digits.txt", "transcripts.jsonl"), True),
        (("evaluation.json", "x"), True),
        (("logs/a", "cache/a", "mine"), False),
    ],
)
def test_an_evaluation_overwrites_an_earlier_one_even_if_that_failed_and_nothing_else(tmp_path, content, ours):
    for name in content:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).touch()
    ending = "choose another folder, or give --overwrite" if ours else "choose another folder"
    with pytest.raises(ConfigError, match=f"out is not empty; {ending}$"):
        prepare(tmp_path / "out", overwrite=False)
    if ours:
        prepare(tmp_path / "out", overwrite=True)
        assert not (tmp_path / "out").exists()
    else:
        with pytest.raises(ConfigError, match=f"{ending}$"):
            prepare(tmp_path / "out", overwrite=True)
        assert (tmp_path / "out" / "mine").exists()


def test_resume_and_overwrite_contradict():
    ran = run("train", "a.yaml", "--resume", "--overwrite")
    assert (ran.exit_code, "give only one of them" in ran.output) == (2, True)


@pytest.mark.parametrize("mode", ["explore", "bench", "serve"])
def test_only_what_writes_checkpoints_resumes(mode):
    ran = run("train", "a.yaml", "--mode", mode, "--resume")
    assert (ran.exit_code, f"--mode {mode} writes no checkpoints" in ran.output) == (2, True)


def test_a_wrong_configuration_ends_with_status_2_and_no_traceback():
    ran = start("explain", "nowhere.yaml")
    assert ran.returncode == 2
    assert ran.stderr == (
        "rlsdk: the configuration has a fault:\n  - nowhere.yaml: there is no such file (working folder: "
        f"{os.path.basename(os.getcwd())}/)\n"
    )
    debugged = start("--debug", "explain", "nowhere.yaml")
    assert "Traceback" in debugged.stderr and debugged.returncode == 2


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        ("RunError('actor engine-0 died in step 3')", 1, "rlsdk: actor engine-0 died in step 3\n"),
        ("ConfigError(['steps: 0'])", 2, "rlsdk: the configuration has a fault:\n  - steps: 0\n"),
        ("KeyboardInterrupt()", 130, "rlsdk: interrupted\n"),
        (
            "OSError(9, 'Bad file descriptor', 999)",
            1,
            "rlsdk: a file: Bad file descriptor; --debug before the command shows where\n",
        ),
    ],
)
def test_errors_become_messages_and_statuses(site, error, status, shown):
    site.install("lab", {"labcli.py": HELLO.replace("{error}", error)}, commands={"doomed": "labcli:doomed"})
    ran = run("doomed")
    assert (ran.exit_code, ran.stderr) == (status, shown)


def test_unexpected_exceptions_keep_their_traceback(site):
    site.install(
        "lab", {"labcli.py": HELLO.replace("{error}", "ValueError('what?')")}, commands={"doomed": "labcli:doomed"}
    )
    ran = start(
        "doomed", env={**os.environ, "PYTHONPATH": f"{site.folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    )
    assert ran.returncode == 1
    assert "Traceback" in ran.stderr
    assert ran.stderr.endswith("ValueError: what?\n")


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupt_ends_with_status_130(site):
    code = "import click, time\n@click.command()\ndef wait():\n    print('ready', flush=True)\n    time.sleep(60)\n"
    site.install("lab", {"labcli.py": code}, commands={"wait": "labcli:wait"})
    environment = {**os.environ, "PYTHONPATH": f"{site.folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "rlsdk.cli", "wait"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell starts what runs in its background with SIGINT ignored, and children inherit that.
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, **pipes, text=True, env=environment, preexec_fn=listening) as process:  # noqa: PLW1509
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "rlsdk: interrupted\n")


def test_an_interrupt_during_the_first_imports_ends_with_status_130(tmp_path):
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    ran = start("--version", env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"})
    assert (ran.returncode, ran.stderr) == (130, "rlsdk: interrupted\n")


# --- commands of plugins


def test_a_command_of_a_plugin_is_listed_unloaded_and_runs(site):
    site.install("rlsdk-lab", {"labcli.py": HELLO.replace("{error}", "x")}, commands={"hello": "labcli:hello"})
    assert re.search(r"Commands of plugins:\n  hello +of rlsdk-lab 1.0", run("--help").output)
    assert "labcli" not in sys.modules
    assert run("hello", "you").output == "hello you\n"
    assert "Say hello." in run("hello", "--help").output


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("labcli:gone", "AttributeError"),
        ("nowhere:hello", "ModuleNotFoundError: No module named 'nowhere'"),
        ("labcli:plain", "labcli:plain is a function; expected a click command"),
        ("leaving:hello", "SystemExit: 0 ("),
    ],
)
def test_a_broken_command_names_its_distribution_and_cause(site, value, cause):
    files = {"labcli.py": HELLO.replace("{error}", "x"), "leaving.py": "raise SystemExit(0)"}
    site.install("rlsdk-lab", files, commands={"hello": value})
    assert "hello" in run("--help").output
    ran = run("hello", "you")
    assert ran.exit_code == 1
    assert ran.stderr.startswith("rlsdk: command 'hello' of rlsdk-lab 1.0 is broken: ")
    assert cause in ran.stderr


def test_two_distributions_that_claim_a_command_are_both_named(site):
    for name in ("lab-one", "lab-two"):
        site.install(name, {"labcli.py": HELLO.replace("{error}", "x")}, commands={"hello": "labcli:hello"})
    assert re.search(r"broken: claimed by lab-\w+ 1.0 and\s+lab-\w+ 1.0", run("--help").output)
    ran = run("hello", "you")
    assert ran.exit_code == 1
    assert all(part in ran.stderr for part in ("lab-one 1.0", "lab-two 1.0", "uninstall one of them"))


def test_no_plugin_shadows_a_command_of_rlsdk(site):
    site.install("lab", {"labcli.py": HELLO.replace("{error}", "x")}, commands={"plugins": "labcli:hello"})
    assert re.search(r"plugins +broken: the name belongs to rlsdk; lab 1.0 must\s+choose another", run("--help").output)
    assert "core" in run("plugins").output


# --- the check of the machine


def test_commands_that_read_models_meet_the_torchvision_trap(site, tmp_path):
    """Without the packages themselves: their metadata alone says that importing a model would fail."""
    site.install("torch", version="2.13.0+cpu")
    site.install("torchvision", version="0.28.0")
    for name in sorted(READS_MODELS):
        ran = run(name, "--help")
        assert ran.exit_code == 1, name
        assert "importing a transformers model fails" in ran.stderr
        assert "pip uninstall -y torchvision" in ran.stderr
    assert run("plugins").exit_code == 0
    assert run("--help").exit_code == 0


def test_a_model_is_made_once(tmp_path):
    pytest.importorskip("transformers")
    folder = tmp_path / "nano"
    ran = run("model", "new", "nano", str(folder), "--seed", "1", "--hidden", "32", "--heads", "2", "--layers", "1")
    assert (ran.exit_code, ran.stdout.splitlines()[-1]) == (0, f"{folder}: {_parameters(folder):,} parameters")
    again = run("model", "new", "nano", str(folder))
    assert (again.exit_code, "is not empty" in again.output) == (2, True)
    assert "not a multiple of --heads 3" in run("model", "new", "nano", str(tmp_path / "x"), "--heads", "3").output
    other = run("model", "new", "nano", str(folder), "--overwrite", "--hidden", "32", "--heads", "2", "--layers", "1")
    assert other.exit_code == 0


def _parameters(folder):
    from transformers import AutoModelForCausalLM

    return sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())


def test_a_thread_that_a_plugin_leaves_behind_does_not_keep_the_program() -> None:
    thread = "import threading; threading.Thread(target=threading.Event().wait, name='sync').start()"
    code = f"import rlsdk.cli as cli; cli.EXIT_SECONDS = 0.1; {thread}; cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "train"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "these threads still run: sync; the process exits" in done.stderr


def test_a_thread_delays_a_command_that_only_inspects_for_seconds(tmp_path):
    poll = "import threading; threading.Thread(target=threading.Event().wait, name='poll').start()\n"
    (tmp_path / "lab.py").write_text(f"{poll}import rlsdk\n@rlsdk.kl('zero')\ndef zero(p, q):\n    return p - q\n")
    done = start("plugins", "lab", "--plugin", "lab.py", cwd=tmp_path, timeout=50)
    assert done.returncode == 0 and "these threads still run: poll; the process exits after 2 s" in done.stderr


def test_json_is_alone_on_standard_output_whatever_a_plugin_writes_to_its_descriptor(tmp_path):
    writes = "import os, subprocess\nos.write(1, b'banner')\nsubprocess.run(['echo', 'child'])\n"
    (tmp_path / "lab.py").write_text(f"{writes}import rlsdk\n@rlsdk.kl('zero')\ndef zero(p, q):\n    return p - q\n")
    done = start("plugins", "lab", "--plugin", "lab.py", "--json", cwd=tmp_path)
    assert [each["name"] for each in json.loads(done.stdout)["components"]] == ["lab/zero"]
    assert "banner" in done.stderr and "child" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "--config", "mine.yaml"], "The configuration is given without an option"),
        (["explain", "mine.yaml", "--lr", "1e-6"], "veRL's lr is learner.lr here"),
        (["simulate", "mine.yaml", "--gpus", "8,x"], "expected numbers of GPUs such as 8 or 8,64,1024"),
        (["simulate", "mine.yaml", "--gpus", "8x4"], "four nodes with 8 GPUs each have 32"),
        (["diagnose", "runs"], "it holds folders of runs: runs/mine"),
        (["diagnose", "runs/mien"], "there is no such folder; did you mean runs/mine?"),
        (["trace", "runs/mine/checkpoints"], "is inside the folder of a run; give that folder"),
        (["rollouts", "mine.yaml"], "mine.yaml is a file; expected the folder of a run"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_answered_with_what_was_meant(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / ".rlsdk-run").touch()
    model = Path(__file__).parents[2] / "examples" / "models" / "countdown-nano"
    (tmp_path / "mine.yaml").write_text(
        f"name: mine\nmodel: {{path: {model}, max_length: 32}}\ntasks: {{train: countdown}}\n"
        "max_prompt_tokens: 16\nsampling: {max_tokens: 14}\nreward: countdown\nsteps: 4\n"
    )
    ended = run(*arguments)
    assert ended.exit_code == 2
    assert said in ended.output


def test_migrate_refuses_the_configuration_of_another_trainer(tmp_path):
    file = tmp_path / "verl.yaml"
    file.write_text(
        "trainer: {total_epochs: 15}\nalgorithm: {adv_estimator: grpo}\ndata: {train_files: x, train_batch_size: 8}\n"
    )
    ended = run("migrate", "TRL", str(file))
    assert ended.exit_code == 2
    assert "TRL has none of its 4 keys; it looks like a config of veRL: rlsdk migrate verl" in ended.output
    file.write_text("")
    assert "is empty; expected a mapping" in run("migrate", "verl", str(file)).output


def test_diagnose_runs_with_an_empty_config(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.yaml").write_text("")
    ended = run("diagnose", str(tmp_path))
    assert ended.exit_code == 0
    assert "is empty or damaged" in ended.output


def test_diagnose_says_what_a_short_run_shows_and_what_it_cannot_judge(tmp_path):
    dead = [{"step": i, "reward/mean": 0.1, "groups/dead": 1.0, "rollouts/entropy": 1.0} for i in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in dead))
    ended = run("diagnose", str(tmp_path))
    assert "Too few values of a metric to judge: dead_groups (5 of 10), entropy_collapse (5 of 20)." in ended.stdout
    assert "step 5  warning  dead_groups, with window=5: in 100% of the groups" in ended.stdout
    assert "First and last values: reward/mean 0.1 → 0.1" in ended.stdout
    ended = run("diagnose", str(tmp_path), "--json")
    assert (json.loads(ended.stdout), "dead_groups (5 of 10)" in ended.stderr) == ([], True)


def test_diagnose_says_why_a_run_failed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.1}\n')
    (tmp_path / "summary.json").write_text('{"status": "failed", "error": "step 2: KeyError: \\u001b[2J"}')
    assert "The run failed: step 2: KeyError: \\x1b[2J\nNothing found" in run("diagnose", str(tmp_path)).stdout
    ended = run("diagnose", str(tmp_path), "--json")
    assert (json.loads(ended.stdout), "The run failed: step 2" in ended.stderr) == ([], True)
    (tmp_path / "summary.json").write_text('{"status": "finished"}')
    assert "failed" not in run("diagnose", str(tmp_path)).stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_named_without_a_traceback():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "rlsdk.cli", "config"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("rlsdk: standard output: No space left on device")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["config"], ["plugins", "--json"]], ids=str)
def test_closed_output_ends_a_command_quietly(arguments):
    command = [sys.executable, "-m", "rlsdk.cli", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 141)


def test_a_path_that_cannot_be_used_is_named_without_a_traceback():
    ended = run("new", "reward", "a" * 300)
    assert ended.exit_code == 1
    assert "File name too long" in ended.output


def test_output_in_an_encoding_with_fewer_characters_is_not_an_error():
    ended = start("plugins", "algorithm", env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert ended.returncode == 0, ended.stderr
    assert "grpo" in ended.stdout


def test_a_folder_whose_name_is_not_utf8_is_named_byte_by_byte(tmp_path):
    folder = os.fsencode(tmp_path) + b"/M\xfcller"
    os.mkdir(folder)
    Path(os.fsdecode(folder), "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    command = [sys.executable, "-m", "rlsdk.cli", "diagnose", folder]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    ended = subprocess.run(command, capture_output=True, env=strict, check=False)
    assert (ended.returncode, b"M\xfcller" in ended.stdout) == (0, True), ended.stderr


def test_zero_columns_mean_no_limit():
    ended = start("config", "learner.lr", env={**os.environ, "COLUMNS": "0"})
    assert "learner.lr" in ended.stdout
