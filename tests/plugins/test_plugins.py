"""Plugins are found by metadata and imported by name, one component per name; and all ways in which this can fail."""

from __future__ import annotations

import importlib.metadata
import pickle
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import attrs
import pytest

import rlsdk
from rlsdk.errors import FingerprintError, OptionError, PluginError, UnknownComponentError
from rlsdk.plugins import PluginEntry, Plugins, discover
from rlsdk.plugins.discovery import misspelt_module

EXACT = """
    import rlsdk

    @rlsdk.reward("exact")
    def exact(rollout, *, scale: float = 1.0) -> float:
        '''Full marks or nothing.'''
        return scale * float(rollout.text == rollout.task.answer)
"""
RIGHT = rlsdk.Rollout.from_text(rlsdk.Task(id="1", prompt="?", answer="yes"), "yes")


@pytest.fixture
def mylab(site):
    """One plugin with one reward."""
    site.install("rlsdk-mylab", {"rlsdk_mylab.py": EXACT}, plugins={"mylab": "rlsdk_mylab"})
    return site


@pytest.mark.parametrize(
    ("files", "says"),
    [(["rlsdk_mylab.py"], "names it; did you mean 'rlsdk_mylab'? Correct "), ([], "names it. Correct ")],
)
def test_a_misspelt_module_is_reported_with_the_known_ones(monkeypatch, files, says):
    held = [importlib.metadata.PackagePath(each) for each in files]
    monkeypatch.setattr(importlib.metadata, "files", lambda _: held)
    assert says in misspelt_module(PluginEntry("mylab", "rlsdk_mylap", "rlsdk-mylab"))


def failure(*args, error=PluginError, **options):
    with pytest.raises(error) as caught:
        rlsdk.load(*args, **options)
    return str(caught.value)


# --- names


def test_a_component_of_a_plugin_is_loaded_by_name(mylab):
    assert rlsdk.load("reward", "mylab/exact", scale=2)(RIGHT) == 2.0
    assert "mylab/exact" in rlsdk.names("reward")


def test_a_wrong_component_name_is_answered_with_what_there_is(mylab):
    text = failure("reward", "mylab/exat", error=UnknownComponentError)
    assert text == "unknown reward 'mylab/exat'; mylab offers: exact"


def test_among_many_the_nearest_is_suggested():
    text = failure("kl", "lowvar", error=UnknownComponentError)
    assert text.startswith("unknown kl 'lowvar'; core offers: ")
    assert text.endswith("; did you mean 'low_var'?")


def test_a_plugin_in_place_of_its_component_is_answered_with_how_it_is_written(mylab):
    assert failure("kl", "mylab").endswith("; a component of the plugin 'mylab' is written mylab/NAME")


def test_the_suggestion_has_the_prefix(site):
    code = "import rlsdk\n@rlsdk.kl('near')\ndef a(p, q): ...\n@rlsdk.kl('far')\ndef b(p, q): ...\n"
    site.install("lab", {"lab.py": code}, plugins={"lab": "lab"})
    assert failure("kl", "lab/nera").endswith("lab offers: far, near; did you mean 'lab/near'?")


def test_a_file_in_place_of_a_name_is_answered_with_how_it_is_given():
    assert failure("tasks", "data/train.jsonl").endswith("is a file; write {use: jsonl, path: data/train.jsonl}")
    text = failure("reward", "rewards/short.py")
    assert "load it with --plugin rewards/short.py" in text
    assert text.endswith("name its component: short/NAME")


def test_a_wrong_kind_is_answered_with_the_kinds():
    text = failure("rewrd", "countdown", error=UnknownComponentError)
    assert text.startswith("unknown kind 'rewrd'; rlsdk offers: advantage, ")
    assert text.endswith("did you mean 'reward'?")
    with pytest.raises(UnknownComponentError, match="unknown kind"):
        rlsdk.names("rewrd")


def test_a_wrong_plugin_is_answered_with_the_plugins(mylab):
    text = failure("reward", "mylib/exact")
    assert text == (
        "unknown plugin 'mylib'; this environment offers: core, mylab; did you mean 'mylab'?; install its package "
        "(pip install …), or give its file (--plugin mylib.py)"
    )


def test_a_plugin_of_the_repository_is_answered_with_its_folder():
    repository = Path(__file__).parents[2]
    projects = (tomllib.loads(file.read_text()) for file in repository.glob("plugins/*/pyproject.toml"))
    names = [name for each in projects for name in each["project"].get("entry-points", {}).get("rlsdk.v1", {})]
    assert "reasoning_gym" in names
    for name in set(names) - set(discover()):
        folder = f"plugins/rlsdk-{name.replace('_', '-')}"
        assert (repository / folder).is_dir()
        assert f"(pip install {folder}, in a clone of rlsdk)" in failure("reward", f"{name}/score")


def test_a_component_of_another_kind_is_not_offered_and_its_kind_is_told(mylab):
    expected = "unknown advantage 'mylab/exact'; mylab offers: none; mylab/exact is of kind reward"
    assert failure("advantage", "mylab/exact") == expected


@pytest.mark.parametrize("name", [3, None, len])
def test_an_invalid_name_is_refused(name):
    assert "reward: expected a name, or a marked object in its place; got " in failure("reward", name)


def test_wrong_options_name_the_component(mylab):
    assert failure("reward", "mylab/exact", error=OptionError, scale="2", scal=1).startswith("reward 'exact': scale: ")


# --- discovery


def test_discovery_imports_nothing(site):
    site.install("rlsdk-bang", {"bang.py": "raise SystemExit('imported')"}, plugins={"bang": "bang"}, version="2.1")
    assert discover()["bang"] == (PluginEntry("bang", "bang", "rlsdk-bang", "2.1"),)
    assert "bang" not in sys.modules


def test_a_package_is_found_as_soon_as_it_is_installed_and_gone_once_it_is_removed(site):
    assert "late" not in discover()
    site.install("rlsdk-late", {"late.py": EXACT}, plugins={"late": "late"})
    assert "late" in discover()
    shutil.rmtree(site.folder / "rlsdk_late-1.0.dist-info")
    assert "late" not in discover()


def test_core_comes_first_and_is_ours(mylab):
    found = discover()
    assert next(iter(found)) == "core"
    assert [(e.distribution, e.module, e.broken) for e in found["core"]] == [("rlsdk", "rlsdk.builtins", "")]


def test_no_plugin_shadows_core(site):
    code = "import rlsdk\n@rlsdk.kl('k1')\ndef k1(p, q): return 'stolen'\n"
    site.install("impostor", {"impostor.py": code}, plugins={"core": "impostor"})
    (claim,) = discover()["core of impostor"]
    assert claim.distribution == "impostor"
    assert claim.broken == "the name 'core' belongs to rlsdk; choose another"
    assert rlsdk.load("kl", "k1").component.obj.__module__ == "rlsdk.algorithms.kl"
    assert rlsdk.load("kl", "core/k1").component.obj.__module__ == "rlsdk.algorithms.kl"
    assert "impostor" not in sys.modules
    assert "impostor 1.0 also declares 'core', which belongs to rlsdk" in failure("kl", "core/stolen")
    assert "impostor" not in failure("kl", "stolen")


def test_two_distributions_that_claim_a_name_are_both_named(mylab):
    mylab.install("other-lab", {"other_lab.py": EXACT}, plugins={"mylab": "other_lab"}, version="3.0")
    assert len(discover()["mylab"]) == 2
    text = failure("reward", "mylab/exact")
    for part in ("plugin 'mylab' is claimed by", "rlsdk-mylab 1.0", "other-lab 3.0", "uninstall one"):
        assert part in text
    assert rlsdk.load("kl", "k1")  # what does not use the name does not notice
    assert not [name for name in rlsdk.names("reward") if name.startswith("mylab/")]


def test_a_distribution_seen_twice_is_one(mylab):
    egg = mylab.folder / "rlsdk_mylab.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: rlsdk-mylab\nVersion: 1.0\n")
    (egg / "entry_points.txt").write_text("[rlsdk.v1]\nmylab = rlsdk_mylab\n")
    assert len(discover()["mylab"]) == 1


def test_of_an_entry_point_that_names_an_attribute_the_module_counts(site):
    site.install("rlsdk-lab", {"lab.py": EXACT}, plugins={"lab": "lab:rewards"})
    assert Plugins().reference("reward", "lab/exact").name == "lab/exact"


def test_a_name_that_no_config_can_write_is_broken(site):
    site.install("odd", {"odd.py": EXACT}, plugins={"a/b": "odd"})
    assert "no config can write it" in discover()["a/b"][0].broken


# --- broken plugins


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("class Panic(BaseException): ...\nraise Panic('of Rust')", "Panic: of Rust"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_a_plugin_that_fails_to_import_stops_only_who_names_it(site, code, cause):
    site.install("rlsdk-sad", {"sad.py": code}, plugins={"sad": "sad"})
    for _ in range(2):  # the second time, too
        text = failure("reward", "sad/exact")
        assert text.startswith("plugin 'sad' (rlsdk-sad 1.0) fails to import: ")
        assert cause in text
    assert rlsdk.load("kl", "k1")
    assert rlsdk.names("kl")


def test_a_module_of_a_table_that_fails_to_import_fails_every_time(site):
    files = {"lab/__init__.py": "MODULES = {'reward': ('lab.gone',), 'kl': ('lab.kl',)}", "lab/kl.py": "import rlsdk\n"}
    site.install("lab", files, plugins={"lab": "lab"})
    for _ in range(2):
        assert "plugin 'lab': module lab.gone fails to import: ModuleNotFoundError" in failure("reward", "lab/x")
    assert failure("kl", "lab/x").startswith("unknown kl 'lab/x'; lab offers: none")


def test_a_plugin_that_declares_a_component_twice_is_refused(site):
    code = "import rlsdk\n@rlsdk.kl('k')\ndef first(p, q): ...\n@rlsdk.kl('k')\ndef second(p, q): ...\n"
    site.install("lab", {"lab.py": code}, plugins={"lab": "lab"})
    for _ in range(2):
        text = failure("kl", "lab/k")
        places = "first (", "lab.py, line 2) and second (", "lab.py, line 4); rename one of them"
        assert text.startswith("plugin 'lab' declares kl 'k' twice: ")
        assert all(place in text for place in places)
        assert "0x" not in text


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        (
            "exact",
            "@rlsdk.reward('exact')\ndef exact(rollout): ...\n",
            "@rlsdk.reward('loose')\ndef exact(rollout): ...\n",
        ),
        ("rlsdk_run_end", *["@rlsdk.hookimpl\ndef rlsdk_run_end(status): ...\n"] * 2),
    ],
    ids=["component", "hook"],
)
def test_a_marked_function_that_a_later_one_replaces_is_refused(site, name, first, second):
    site.install("lab", {"lab.py": f"import rlsdk\n{first}{second}"}, plugins={"lab": "lab"})
    says = f"plugin 'lab': {name} is marked in line 3 of lab.py and defined again in line 5, which replaces it"
    assert failure("reward", "lab/loose").startswith(says)


def test_twice_in_two_modules_of_a_table_is_twice(site):
    code = "import rlsdk\n@rlsdk.kl('k')\ndef k(p, q): ...\n"
    files = {"lab/__init__.py": "MODULES = {'kl': ('lab.a', 'lab.b')}", "lab/a.py": code, "lab/b.py": code}
    site.install("lab", files, plugins={"lab": "lab"})
    for _ in range(2):
        assert "plugin 'lab' declares kl 'k' twice" in failure("kl", "lab/k")


@pytest.mark.parametrize(
    "code",
    [
        """
        import functools, rlsdk
        def loud(f):
            @functools.wraps(f)
            def inner(*a, **k): return f(*a, **k)
            return inner
        @loud
        @rlsdk.reward("exact")
        def exact(rollout): ...
        """,
        """
        import attrs, rlsdk
        @attrs.frozen
        @rlsdk.reward("exact")
        class Exact:
            x: int = 1
            def __call__(self, rollout): ...
        """,
    ],
    ids=["function", "class"],
)
def test_the_mark_must_be_outermost(site, code):
    site.install("lab", {"lab.py": code}, plugins={"lab": "lab"})
    text = failure("reward", "lab/exact")
    assert "lab.exact carries the mark of reward 'exact'" in text or "lab.Exact carries" in text
    assert text.endswith("make @rlsdk.reward the outermost decorator")


# --- what counts as a plugin's own


def test_inherited_marks_do_not_count(site):
    code = """
        import rlsdk
        @rlsdk.environment("maze")
        class Maze: ...
        class Bigger(Maze): ...
    """
    site.install("lab", {"lab.py": code}, plugins={"lab": "lab"})
    assert rlsdk.load("environment", "lab/maze").__class__.__name__ == "Maze"


def test_what_is_imported_from_another_package_is_not_offered(mylab):
    code = "from rlsdk_mylab import exact\nimport rlsdk\n@rlsdk.reward('own')\ndef own(rollout): return 0.5\n"
    mylab.install("borrower", {"borrower.py": code}, plugins={"borrower": "borrower"})
    assert failure("reward", "borrower/exact") == "unknown reward 'borrower/exact'; borrower offers: own"


def test_what_a_package_gathers_from_its_own_modules_is_offered_once(site):
    files = {"lab/__init__.py": "from lab.rewards import exact, exact as again", "lab/rewards.py": EXACT}
    site.install("lab", files, plugins={"lab": "lab"})
    assert rlsdk.load("reward", "lab/exact")(RIGHT) == 1.0


def test_a_table_imports_only_what_is_asked_for(site):
    files = {
        "lab/__init__.py": "MODULES = {'reward': ('lab.rewards',), 'advantage': ('lab.heavy',)}",
        "lab/rewards.py": EXACT,
        "lab/heavy.py": "raise RuntimeError('not needed')",
    }
    site.install("lab", files, plugins={"lab": "lab"})
    assert rlsdk.load("reward", "lab/exact")(RIGHT) == 1.0
    assert "lab.heavy" not in sys.modules


def test_one_module_may_serve_several_kinds(site):
    code = "import rlsdk\n@rlsdk.kl('k')\ndef k(p, q): ...\n@rlsdk.stop('s')\ndef s(*, available, target): ...\n"
    files = {"lab/__init__.py": "MODULES = {'kl': ('lab.both',), 'stop': ('lab.both',)}", "lab/both.py": code}
    site.install("lab", files, plugins={"lab": "lab"})
    plugins = Plugins()
    assert set(plugins.components("lab")) == {("kl", "k"), ("stop", "s")}


def test_built_in_modules_pass_the_checks_of_other_plugins(site):
    site.install("lab", {"lab.py": "from rlsdk.builtins import MODULES"}, plugins={"lab": "lab"})
    plugins = Plugins()
    assert plugins.components("lab") == plugins.components("core")
    assert plugins.hooks("lab") == []


# --- single files


def test_a_file_is_a_plugin_named_by_its_stem(tmp_path):
    file = tmp_path / "short.py"
    file.write_text("import rlsdk\n@rlsdk.reward('short')\ndef short(rollout): return 1.0\n")
    plugins = Plugins([file])
    reference = plugins.reference("reward", "short/short")
    assert reference.name == "short/short"
    assert plugins.resolve(reference)(RIGHT) == 1.0
    assert plugins.activate(str(file)) == "short"


def test_the_source_of_a_file_travels_with_the_reference(tmp_path):
    file = tmp_path / "short.py"
    file.write_text("import rlsdk\n@rlsdk.reward('short')\ndef short(rollout): return 1.0\n")
    sent = pickle.dumps(Plugins([file]).reference("reward", "short/short"))
    file.unlink()
    code = (
        "import pickle, sys, rlsdk; from rlsdk.plugins import Plugins\n"
        "reward = Plugins().resolve(pickle.loads(sys.stdin.buffer.read()))\n"
        "print(reward(rlsdk.Rollout.from_text(rlsdk.Task(id='1', prompt='?'), 'x')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=False)
    assert ran.stdout.decode().strip() == "1.0", ran.stderr.decode()


def test_two_files_do_not_share_their_marks(tmp_path):
    (tmp_path / "one.py").write_text("import rlsdk\n@rlsdk.kl('k')\ndef k(p, q): return 1\n")
    (tmp_path / "two.py").write_text("import rlsdk\nfrom _rlsdk_files.one import k\n")
    plugins = Plugins([tmp_path / "one.py", tmp_path / "two.py"])
    assert plugins.names("kl", "one") == ["k"]
    assert plugins.names("kl", "two") == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.py", None, "plugin file .*gone.py cannot be read: No such file"),
        ("core.py", "", "the name 'core' is taken by rlsdk .*; rename the file"),
        ("mylab.py", "", "the name 'mylab' is taken by rlsdk-mylab 1.0; rename the file"),
    ],
)
def test_files_that_cannot_be_plugins(mylab, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(PluginError, match=message):
        Plugins([tmp_path / name])


def test_a_file_with_a_fault_is_named_with_the_line(tmp_path):
    (tmp_path / "bad.py").write_text("import rlsdk\nx = (\n")
    with pytest.raises(PluginError, match=r"plugin 'bad' \(.*bad.py\) fails to import: SyntaxError.*line 2"):
        Plugins([tmp_path / "bad.py"]).activate("bad")
    assert "_rlsdk_files.bad" not in sys.modules


@pytest.mark.parametrize("code", ["from .helper import one", "from . import helper", "from ..lab import one"])
def test_a_file_that_imports_relatively_is_answered_with_what_to_write(tmp_path, code):
    (tmp_path / "helper.py").write_text("one = 1")
    (tmp_path / "bad.py").write_text(code)
    with pytest.raises(PluginError, match="belongs to no package: write `import NAME` for a file beside it"):
        Plugins([tmp_path / "bad.py"]).activate("bad")


def test_a_file_whose_code_raises_is_named_with_the_line(tmp_path):
    (tmp_path / "bad.py").write_text("import rlsdk\n\ndef made():\n    return undefined\n\nmade()\n")
    with pytest.raises(PluginError, match=r"fails to import: NameError: .*undefined.* \(.*bad.py, line 4\)$"):
        Plugins([tmp_path / "bad.py"]).activate("bad")


def test_a_module_of_a_package_that_raises_is_named_with_the_line(site):
    files = {"lab/__init__.py": "MODULES = {'kl': ('lab.kl',)}", "lab/kl.py": "import rlsdk\n1 / 0\n"}
    site.install("lab", files, plugins={"lab": "lab"})
    assert failure("kl", "lab/x").endswith("kl.py, line 2)")


def test_a_file_without_a_mark_is_refused_with_advice(tmp_path):
    (tmp_path / "empty.py").write_text("def text(rollout): return 1.0\n")
    with pytest.raises(UnknownComponentError) as caught:
        Plugins([tmp_path / "empty.py"]).reference("reward", "empty/text")
    assert str(caught.value) == (
        "unknown reward 'empty/text'; empty offers: none. It marks nothing: put @rlsdk.reward('text') above the "
        "function or class"
    )


def test_an_init_file_is_named_by_its_folder(tmp_path, monkeypatch):
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "__init__.py").write_text("import rlsdk\n@rlsdk.kl('k')\ndef k(p, q): return 1\n")
    monkeypatch.chdir(tmp_path / "lab")
    plugins = Plugins()
    assert plugins.activate("__init__.py") == "lab"
    reference = plugins.reference("kl", "lab/k")
    monkeypatch.chdir(tmp_path)
    assert Plugins().resolve(reference)(1, 2) == 1


# --- references and fingerprints


def test_a_reference_holds_what_a_worker_needs_and_no_registry(mylab):
    reference = Plugins().reference("reward", "mylab/exact", {"scale": 2})
    assert (reference.kind, reference.name, dict(reference.options)) == ("reward", "mylab/exact", {"scale": 2})
    mark = reference.fingerprint
    assert (mark.distribution, mark.version, len(mark.source)) == ("rlsdk-mylab", "1.0", 64)
    assert len(pickle.dumps(reference)) < 1000
    assert Plugins().resolve(pickle.loads(pickle.dumps(reference)))(RIGHT) == 2.0


@pytest.mark.parametrize("change", [{"version": "0.9"}, {"source": "0" * 64}, {"distribution": "fork"}])
def test_a_worker_with_other_code_refuses(mylab, change):
    reference = Plugins().reference("reward", "mylab/exact")
    other = attrs.evolve(reference, fingerprint=attrs.evolve(reference.fingerprint, **change))
    advice = "do not edit its code while a run starts" if "source" in change else "install the same version"
    with pytest.raises(
        FingerprintError, match=rf"plugin 'mylab' differs between driver and worker: driver .*, worker .*; {advice}"
    ):
        Plugins().resolve(other)


def test_the_fingerprint_sees_every_module_of_the_package(site):
    from rlsdk.plugins import fingerprints

    files = {"lab/__init__.py": "from lab.rewards import exact", "lab/rewards.py": EXACT, "lab/deep/helper.py": "X = 1"}
    site.install("lab", files, plugins={"lab": "lab"})
    before = Plugins().fingerprint("lab")
    assert Plugins().fingerprint("lab") == before
    (site.folder / "lab" / "deep" / "helper.py").write_text("X = 2")
    fingerprints._package_hash.cache_clear()
    assert Plugins().fingerprint("lab") != before


def test_a_worker_that_was_sent_another_file_refuses(tmp_path):
    file = tmp_path / "short.py"
    file.write_text("import rlsdk\n@rlsdk.kl('k')\ndef k(p, q): return 1\n")
    reference = Plugins([file]).reference("kl", "short/k")
    path, source = reference.file
    with pytest.raises(FingerprintError, match="plugin 'short' differs"):
        Plugins().resolve(attrs.evolve(reference, file=(path, source + "# changed")))


# --- marked objects in place of names


@rlsdk.reward("mine")
def mine(rollout, *, scale: float = 1.0) -> float:
    """Mine."""
    return scale


def test_a_marked_object_stands_where_a_name_stands():
    assert rlsdk.load("reward", mine, scale=3)(RIGHT) == 3.0
    bound = rlsdk.load("reward", mine)
    assert rlsdk.load("reward", bound, scale=2)(RIGHT) == 2.0


def test_a_marked_object_of_another_kind_is_refused():
    text = failure("advantage", mine, error=UnknownComponentError)
    assert text.endswith("is marked as reward 'mine'; expected here: advantage")


def test_a_marked_object_is_recorded_by_its_source():
    plugins = Plugins()
    mark = plugins.reference("reward", mine).fingerprint
    assert mark.source == Plugins().reference("reward", mine).fingerprint.source
    assert plugins.used()["test_plugins"].source  # that of the file which the run keeps

    @rlsdk.reward("mine")
    def changed(rollout, *, scale: float = 1.0) -> float:
        return scale + 1

    assert Plugins().reference("reward", changed).fingerprint.source != mark.source


TYPED = """
import sys, rlsdk
from rlsdk.plugins import Plugins
code = '''
@rlsdk.reward("typed")
def typed(rollout, *, names: str = "a"):
    inner = lambda x: x in {"a", "b", "c", "d"}
    return NUMBER if any(inner(n) for n in names) else 0.0

@rlsdk.environment("world")
class World:
    def reset(self, seed): return NUMBER
'''
exec(code.replace("NUMBER", sys.argv[1]))
print(*(Plugins().reference(k, o).fingerprint.source for k, o in (("reward", typed), ("environment", World))))
"""


def test_what_was_typed_into_an_interpreter_has_one_fingerprint_in_every_process():
    def marks(number, seed):
        command = [sys.executable, "-c", TYPED, number]
        environment = {**__import__("os").environ, "PYTHONHASHSEED": seed}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()

    first = marks("1.0", "1")
    assert marks("1.0", "2") == first
    assert not set(marks("2.0", "1")) & set(first)


def test_used_names_what_was_activated_and_nothing_else(mylab):
    plugins = Plugins()
    assert plugins.used() == {}
    plugins.find("kl", "k1")
    assert list(plugins.used()) == ["core"]
    plugins.find("reward", "mylab/exact")
    assert list(plugins.used()) == ["core", "mylab"]


# --- hooks


def test_hooks_are_collected_with_the_components_and_called_by_name(site):
    code = """
        import rlsdk
        seen = []
        @rlsdk.hookimpl
        def rlsdk_step_end(step): seen.append(step)
        @rlsdk.hookimpl
        def rlsdk_run_end(status, summary): seen.append((status, summary))
        @rlsdk.kl("k")
        def k(p, q): ...
    """
    site.install("watcher", {"watcher.py": code}, plugins={"watcher": "watcher"})
    plugins = Plugins()
    plugins.hook.rlsdk_step_end(step=1, metrics={})  # installed is not active
    plugins.activate("watcher")
    plugins.hook.rlsdk_step_end(step=2, metrics={})
    plugins.hook.rlsdk_run_end(status="finished", summary={})
    assert sys.modules["watcher"].seen == [2, ("finished", {})]
    assert plugins.names("kl", "watcher") == ["k"]


@pytest.mark.parametrize(
    ("hook", "cause"),
    [
        (
            "def rlsdk_step_end(step): ...",
            r"lab.py, line 2\) is not marked as a hook, .*; write @rlsdk.hookimpl above it$",
        ),
        ("@rlsdk.hookimpl\nasync def rlsdk_step_end(step): ...", r"is async def, but .*; write def$"),
    ],
)
def test_a_hook_that_would_do_nothing_is_refused(tmp_path, hook, cause):
    (tmp_path / "lab.py").write_text(f"import rlsdk\n{hook}\n")
    with pytest.raises(PluginError, match=f"^plugin 'lab': rlsdk_step_end .*{cause}"):
        Plugins().activate(str(tmp_path / "lab.py"))


def test_a_hook_that_is_a_method_is_refused(tmp_path):
    code = "import rlsdk\nclass Watcher:\n    @rlsdk.hookimpl\n    def rlsdk_step_end(self, step): ...\n"
    (tmp_path / "lab.py").write_text(f"{code}watcher = Watcher()\n")
    with pytest.raises(PluginError, match=r"Watcher.rlsdk_step_end .*lab.py, line 3\) is a method, and would not be"):
        Plugins().activate(str(tmp_path / "lab.py"))


@pytest.mark.parametrize(
    ("hook", "cause"),
    [
        ("rlsdk_step_ended(step)", "unknown hook 'rlsdk_step_ended', did you mean 'rlsdk_step_end'?"),
        ("rlsdk_stop(step)", "known: rlsdk_checkpoint_saved, rlsdk_rollout_done, rlsdk_run_end"),
        ("rlsdk_step_end(stepp)", "the hook rlsdk_step_end has no argument 'stepp'; it may take any of: step, metrics"),
    ],
)
@pytest.mark.parametrize("table", [False, True], ids=["module", "table"])
def test_a_misspelt_hook_is_refused(site, hook, cause, table):
    code = f"import rlsdk\n@rlsdk.hookimpl\ndef {hook}: ...\n@rlsdk.kl('k')\ndef k(p, q): ...\n"
    files = {"lab/__init__.py": "MODULES = {'kl': ('lab.kl',)}" if table else code, "lab/kl.py": code}
    site.install("rlsdk-lab", files, plugins={"lab": "lab"})
    plugins = Plugins()
    for _ in range(2):
        with pytest.raises(PluginError, match=r"plugin 'lab' \(rlsdk-lab 1.0\)") as caught:
            plugins.find("kl", "lab/k")
        assert cause in str(caught.value)
    plugins.find("kl", "k1")
    plugins.hook.rlsdk_step_end(step=1, metrics={})  # nothing of it was left behind


def test_a_plugin_file_may_begin_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "lab.py"
    file.write_bytes(b"\xef\xbb\xbf" + b"import rlsdk\n@rlsdk.kl('k')\ndef k(p, q): ...\n")
    assert Plugins([file]).names("kl", "lab") == ["k"]
