"""The studio's server: form, checks, YAML both ways, files, processes, and access control."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsdk.errors import ConfigError, ValueFault
from rlsdk.viewer.service import ViewerService
from rlsdk.viewer.studio.checks import checked, form_of
from rlsdk.viewer.studio.edits import edited, pruned, read_text, write_text
from rlsdk.viewer.studio.studio import ConfigFiles, Studio, Trainings

Ask = Callable[..., Any]
ROOT = Path(__file__).parents[2]
BASE = f"""
name: nano
model: {{path: {ROOT / "examples/models/countdown-nano"}, max_length: 32}}
tasks: {{train: {{use: countdown, size: 64, numbers: 3, operators: "+-", template: compact}}}}
max_prompt_tokens: 16
reward: countdown
sampling: {{max_tokens: 14}}
steps: 2
engine: transformers
placement: {{device: cpu}}
"""


class Here:
    """Checks in this process: a fork of a new one is slow to begin."""

    async def check(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return checked(request)

    async def form(self, listed: list[Any], file: str | None) -> dict[str, Any]:
        return form_of(listed, file)

    def close(self) -> None:
        pass


@pytest.fixture
def studio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Studio:
    monkeypatch.chdir(tmp_path)
    found = Studio(tmp_path)
    found.checker = Here()  # type: ignore[assignment]
    return found


@pytest.fixture
def service(studio: Studio) -> ViewerService:
    return ViewerService(["runs"], studio=studio)


@cache
def the_form() -> dict[str, Any]:
    return form_of()


def field(path: str) -> dict[str, Any]:
    fields = the_form()["fields"]
    for name in path.split("."):
        found = next(each for each in fields if each["name"] == name)
        fields = found.get("fields", ())
    return dict(found)


def post(service: ViewerService, path: str, content: Any, **headers: str) -> tuple[int, Any]:
    async def talk() -> tuple[int, Any]:
        from aiohttp.test_utils import TestClient, TestServer

        async with TestClient(TestServer(service.application())) as client:
            origin = {"Origin": f"http://127.0.0.1:{client.port}"}
            response = await client.post(f"/api/studio/{path}", json=content, headers=origin | headers)
            return response.status, await response.json()

    return asyncio.run(talk())


def test_the_form_has_every_key_with_type_default_and_help() -> None:
    steps = field("batch_size")
    assert (steps["widget"], steps["type"], steps["default"], steps["unit"]) == ("number", "int >= 1", 64, "tasks")
    assert steps["help"] == "Tasks per step."
    assert field("name")["required"]
    assert (field("long_prompts")["widget"], field("long_prompts")["choices"]) == ("choice", ["drop", "error"])
    assert (field("sampling.stop")["widget"], field("sampling.top_p")["widget"]) == ("value", "number")
    assert (field("engine")["kind"], field("engine")["default"]) == ("engine", {"use": "vllm"})
    assert field("eval.environments")["nullable"]
    assert {each["name"] for each in field("reward")["fields"]} >= {"weight", "gate"}


def test_the_form_has_the_options_of_each_component_and_the_parts_of_algorithms() -> None:
    components = the_form()["components"]
    assert {"grpo", "dapo"} <= set(components["algorithm"])
    parts = {each["name"]: each for each in components["algorithm"]["grpo"]["fields"]}
    assert (parts["policy_loss"]["widget"], parts["policy_loss"]["kind"]) == ("component", "policy_loss")
    assert (parts["filters"]["widget"], parts["filters"]["kind"]) == ("components", "filter")
    environment = components["workflow"]["environment"]["fields"]
    assert next(each for each in environment if each["name"] == "environment")["kind"] == "environment"
    assert all(each["summary"] for named in components.values() for each in named.values())


def test_a_plugin_of_a_file_is_offered_and_a_broken_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import rlsdk\n\n@rlsdk.reward('short')\ndef short(rollout, *, most: int = 5):\n"
        "    '''Reward short answers.\n\n"
        "    Args:\n        rollout: Rollout.\n        most: Most tokens.\n    '''\n    return 1.0\n"
    )
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n")
    found = form_of([str(tmp_path / "mine.py"), str(tmp_path / "bad.py")])
    (option,) = found["components"]["reward"]["mine/short"]["fields"]
    assert (option["name"], option["default"], option["help"]) == ("most", 5, "Most tokens.")
    assert any("nothing_of_this_name" in each for each in found["broken"])


def test_a_plugin_beside_the_configuration_is_offered(service: ViewerService, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.py").write_text(
        "import rlsdk\n\n@rlsdk.reward('short')\ndef short(rollout, *, limit: int = 5):\n    return 1.0\n"
    )
    (tmp_path / "configs" / "first.yaml").write_text("plugins: [mine.py]\nreward: mine/short\n")
    found = post(service, "form", {"files": ["mine.py", 3], "file": "configs/first.yaml"})[1]
    assert found["broken"] == []
    assert [field["name"] for field in found["components"]["reward"]["mine/short"]["fields"]] == ["limit"]


def test_a_check_finds_all_faults_at_once_with_their_paths() -> None:
    text = BASE.replace("steps: 2", "steps: 0\nbatch_sise: 4\nlearner: {lr: fast}").replace("countdown\n", "countdwn\n")
    found = checked({"text": text})
    paths = {each["path"] for each in found["faults"]}
    assert {"batch_sise", "learner.lr", "reward"} <= paths
    assert "did you mean 'batch_size'" in next(e["message"] for e in found["faults"] if e["path"] == "batch_sise")


def test_a_check_explains_the_arithmetic_memory_and_disk() -> None:
    found = checked({"text": BASE})
    assert found["faults"] == found["warnings"] == []
    assert found["plan"]["batch"]["rollouts"].startswith("64 tasks × 8 = 512 rollouts in each step")
    assert found["plan"]["memory"]["learner weights (host)"].endswith("MiB")
    assert found["plan"]["disk"]["needed"]
    assert (found["name"], Path(found["folder"]).name, found["exists"]) == ("nano", "nano", False)


@pytest.mark.parametrize(
    "text", ["a: [1", "- 1\n- 2", "3", "just text", "name: ${unclosed", "a: 1\n\tb: 2", "\x00", "? {a: b}\n: c"]
)
def test_a_file_without_a_configuration_is_a_fault(text: str) -> None:
    found = checked({"text": text})
    assert found["text"] == text
    assert found["faults"]


def test_an_edit_writes_only_what_differs_from_the_defaults() -> None:
    edits = [
        {"path": ["name"], "value": "first"},
        {"path": ["seed"], "yaml": "0"},
        {"path": ["learner", "lr"], "yaml": "1e-3"},
        {"path": ["engine"], "value": {"use": "transformers"}},
        {"path": ["reward"], "value": [{"use": "countdown"}]},
        {"path": ["reward", 0, "weight"], "yaml": "2"},
        {"path": ["algorithm", "policy_loss", "clip_low"], "yaml": "0.2"},
        {"path": ["algorithm", "policy_loss", "clip_high"], "yaml": "0.28"},
        {"path": ["eval", "every"], "yaml": "0"},
    ]
    text = checked({"text": "", "edits": edits})["text"]
    assert read_text(text)[0] == {
        "name": "first",
        "learner": {"lr": 0.001},
        "engine": "transformers",
        "reward": [{"use": "countdown", "weight": 2}],
        "algorithm": {"policy_loss": {"clip_high": 0.28}},
    }


def test_a_further_edit_names_no_component_that_the_user_did_not_choose() -> None:
    first = checked(
        {"text": "algorithm: {use: grpo, group_size: 4}\n", "edits": [{"path": ["learner", "lr"], "yaml": "1e-3"}]}
    )
    again = checked({"text": first["text"], "edits": [{"path": ["learner", "lr"], "yaml": "1e-4"}]})
    assert again["tree"]["learner"] == {"lr": 0.0001}
    assert again["tree"]["algorithm"]["use"] == "grpo"  # which the user wrote
    removed = checked({"text": again["text"], "edits": [{"path": ["learner", "lr"]}]})
    assert "learner" not in removed["tree"]


def test_a_default_of_the_algorithm_is_not_taken_for_the_key_s_own() -> None:
    """An algorithm that changes a default: setting the key's own default says something, and stays."""
    components = the_form()["components"]["algorithm"]
    from rlsdk.plugins import Plugins

    plugins = Plugins()
    path, name = next(
        (path, name)
        for name in components
        if not any(each["required"] for each in components[name]["fields"])
        for path in plugins.resolve(plugins.reference("algorithm", name)).defaults
        if field(path)["widget"] not in ("component", "components")
    )
    own = field(path)["default"]
    found = checked({"text": f"algorithm: {name}\n", "edits": [{"path": path.split("."), "value": own}]})
    node = found["tree"]
    for each in path.split("."):
        node = node[each]
    assert node == own


def test_a_removed_value_goes_and_so_does_its_empty_section() -> None:
    found = checked({"text": BASE, "edits": [{"path": ["sampling", "max_tokens"]}, {"path": ["reward"]}]})
    assert "sampling" not in found["tree"]
    assert "reward" not in found["tree"]


def test_text_that_would_break_out_of_a_value_stays_a_value() -> None:
    for text in ("1\nseed: 7", "1 # comment", "[1", "${oops", "!!python/object/apply:os.system [ls]"):
        found = checked({"text": "name: n\n", "edits": [{"path": ["steps"], "yaml": text}]})
        assert set(found["tree"]) <= {"name", "steps"}
        assert found["tree"].get("steps") in (text, text.replace("${", "\\${"), 1)


def leaves(fields: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    for each in fields:
        path = (*prefix, each["name"])
        if each["widget"] == "section":
            yield from leaves(each["fields"], path)
        elif each["widget"] != "components":
            yield path, each


VALUES: Mapping[str, st.SearchStrategy[Any]] = {
    "flag": st.booleans(),
    "number": st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False),
    "text": st.text(st.characters(codec="utf-8", exclude_characters="$", exclude_categories=["Cs", "Cc"])),
    "value": st.lists(st.integers() | st.booleans() | st.sampled_from(["a", "yes", "1e-3", "null", "~", "0x1"])),
}


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_form_to_yaml_to_form_loses_nothing(data: st.DataObject) -> None:
    form = the_form()
    known = list(leaves(form["fields"]))
    tree: dict[str, Any] = {}
    wanted = {}
    for path, each in data.draw(st.lists(st.sampled_from(known), max_size=8, unique_by=lambda pair: pair[0])):
        if each["widget"] == "component":
            name = data.draw(st.sampled_from(sorted(form["components"][each["kind"]])))
            value: Any = {"use": name}
        elif each["widget"] == "choice":
            value = data.draw(st.sampled_from(each["choices"]))
        else:
            value = data.draw(VALUES[each["widget"]])
        wanted[path] = value
        tree, faults = edited(tree, [{"path": list(path), "value": value}])
        assert not faults
    tree = pruned(tree, form)
    again, faults = read_text(write_text(tree))
    assert not faults
    assert again is not None
    for path, value in wanted.items():
        default = dict(known)[path]["default"]
        node: Any = again
        for name in path:
            node = node.get(name, default if name == path[-1] else {}) if isinstance(node, dict) else node
        assert node in (value, value["use"] if isinstance(value, dict) else value), path
    assert write_text(pruned(again, form)) == write_text(tree)


def test_files_are_those_below_the_folder_and_no_others(tmp_path: Path) -> None:
    files = ConfigFiles(tmp_path / "work")
    for name in ("a.yaml", "configs/b.yml", ".hidden/c.yaml", "runs/one/config.yaml", "notes.txt"):
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("name: a\n")
    (tmp_path / "work/runs/one/.rlsdk-run").touch()
    (tmp_path / "out.yaml").write_text("secret: 1\n")
    (tmp_path / "work/link.yaml").symlink_to(tmp_path / "out.yaml")
    (tmp_path / "work/away").symlink_to(tmp_path)
    assert files.names() == ["a.yaml", "link.yaml", "configs/b.yml"]
    assert files.read("a.yaml")[0] == "name: a\n"
    bad = ("../out.yaml", "/etc/passwd", str(tmp_path / "out.yaml"), "link.yaml", "away/out.yaml", "a.txt", "")
    for name in (
        *bad,
        ".hidden/c.yaml",
        "runs/one/config.yaml",
        "a\x00.yaml",
        "x\n.yaml",
        "a\\b.yaml",
        "x" * 2000 + ".yaml",
    ):
        with pytest.raises(ValueFault):
            files.read(name)
        with pytest.raises(ValueFault):
            files.save(name, "x: 1\n", "")
    assert (tmp_path / "out.yaml").read_text() == "secret: 1\n"


def test_a_file_that_was_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    files = ConfigFiles(tmp_path)
    version = files.save("a.yaml", "name: a\n", "")
    with pytest.raises(ValueFault, match="exists already"):
        files.save("a.yaml", "name: b\n", "")
    version = files.save("a.yaml", "name: c\n", version)
    (tmp_path / "a.yaml").write_text("name: theirs\n")
    with pytest.raises(ValueFault, match="was changed meanwhile"):
        files.save("a.yaml", "name: d\n", version)
    assert [each.name for each in tmp_path.iterdir()] == ["a.yaml"]


def test_without_the_studio_there_is_nothing_to_write_or_start(run: Path, ask: Ask) -> None:
    service = ViewerService([str(run)])
    assert "studio" not in [page["name"] for page in ask(service, "/api/state")[2]["pages"]]
    for path in ("check", "start", "save", "stop", "resume", "form"):
        assert post(service, path, {})[0] == 404


@pytest.mark.parametrize("path", ["check", "start", "save", "stop", "resume", "form"])
def test_requests_of_other_pages_are_refused(service: ViewerService, ask: Ask, path: str) -> None:
    for headers in (
        {"Origin": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
    ):
        status, _, content = ask(service, f"/api/studio/{path}", method="POST", headers=headers)
        assert (status, content["error"]) == (403, "changes are accepted only from the viewer's own page")
    assert post(service, path, {}, Host="evil.example")[0] == 403
    assert post(service, path, {}, **{"Content-Type": "text/plain"})[0] == 400
    assert post(service, path, [])[0] == 400
    service.token = "secret"  # as the command sets one, also at a loopback address
    assert post(service, path, {})[0] == 403


def test_a_faulty_configuration_does_not_start(service: ViewerService, tmp_path: Path) -> None:
    status, content = post(service, "start", {"text": BASE.replace("steps: 2", "steps: 0"), "file": "a.yaml"})
    assert status == 400
    assert "steps" in content["error"]
    assert list(tmp_path.iterdir()) == []


def test_names_and_paths_lead_nowhere_else(service: ViewerService, tmp_path: Path) -> None:
    for name in ("../away", "a/b", ".."):
        status, content = post(service, "start", {"text": BASE.replace("nano\n", f"'{name}'\n", 1)})
        assert (status, "cannot name a folder" in content["error"]) == (400, True)
    for name in ("../x", "nano", "/etc/x"):
        assert post(service, "stop", {"name": name})[1]["error"].endswith(
            "was not started by the studio of this folder"
        )
    assert post(service, "start", {"text": BASE, "file": "../a.yaml"})[0] == 400
    assert post(service, "save", {"file": "a.yaml", "text": 3})[0] == 400
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_a_run_is_not_started_over(studio: Studio, tmp_path: Path) -> None:
    (tmp_path / "runs/nano").mkdir(parents=True)
    (tmp_path / "runs/nano/config.yaml").write_text(BASE)
    with pytest.raises(ConfigError, match="already holds a run"):
        asyncio.run(studio.start(BASE, "", "", resume=False))


def test_a_training_is_stopped_as_by_ctrl_c_and_outlives_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings = Trainings(tmp_path)
    (tmp_path / "rlsdk").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # a training that waits for its end, in place of a real one
    (tmp_path / "rlsdk/__init__.py").touch()
    (tmp_path / "rlsdk/cli.py").write_text(
        # As `rlsdk train` does: what was started in the background of a shell ignores Ctrl-C otherwise.
        "import signal, sys, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "print('begins', *sys.argv[1:], flush=True)\n"
        "try:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    print('saved')\n    sys.exit(130)\n"
    )
    started = trainings.start("one", str(tmp_path / "runs/one"), Path("a.yaml"))
    try:
        wait_for(lambda: "begins train a.yaml" in trainings.output("one"))
        assert os.getsid(started.process.pid) == started.process.pid  # not that of the server, which Ctrl-C ends
        with pytest.raises(ValueFault, match="is already running"):
            trainings.start("one", started.folder, Path("a.yaml"))
        later = Trainings(tmp_path)  # another server finds it again
        assert later.runs(later.listed()[0])
        assert later.stop("one").stops == 1
        wait_for(lambda: not trainings.runs(started))
        assert (trainings.listed()[0].code, "saved" in trainings.output("one")) == (130, True)
        with pytest.raises(ValueFault, match="is not running"):
            later.stop("one")
        again = trainings.start("one", started.folder, Path("a.yaml"), resume=True)
        wait_for(lambda: "train a.yaml --resume" in trainings.output("one").rpartition("begins")[2])
        os.kill(again.process.pid, signal.SIGKILL)
    finally:
        trainings._children["one"].kill()
        trainings._children["one"].wait(30)
    assert (tmp_path / ".rlsdk/.gitignore").read_text() == "*\n"


def test_another_process_with_a_noted_number_is_not_signalled(tmp_path: Path) -> None:
    trainings = Trainings(tmp_path)
    trainings.notes.mkdir(parents=True)
    process = {"pid": os.getpid(), "started": time.time() - 86400, "host": "here", "machine": "here"}
    note = {"name": "old", "folder": "runs/old", "file": "a.yaml", "begun": 1.0, "process": process}
    (trainings.notes / "old.json").write_text(json.dumps(note))
    with pytest.raises(ValueFault, match="is not running"):
        trainings.stop("old")


def test_the_command_has_a_token_with_the_studio_and_needs_no_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlsdk.cli", "view", "--studio", "--port", "0", "--no-open"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    assert process.stdout
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        assert "?token=" in address
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def wait_for(found: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
