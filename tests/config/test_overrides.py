"""Overrides and interpolation: users' input, and the messages for mistakes."""

from __future__ import annotations

import pytest
import yaml

from rlsdk.config import read
from rlsdk.errors import ConfigError


def tree(source, *overrides):
    found, faults = read(source, overrides)
    assert faults == []
    return found


def fault(source, *overrides):
    _, faults = read(source, overrides)
    (one,) = faults
    return one


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=1e-6", 1e-6),
        ("a=1.5", 1.5),
        ("a=true", True),
        ("a=null", None),
        ("a=", None),
        ("a=text with blanks", "text with blanks"),
        ("a='1'", "1"),
        ("a=[1, x]", [1, "x"]),
        ("a={use: b, c: 1}", {"use": "b", "c": 1}),
        ("a=b=c", "b=c"),
        ("a.b=1", {"b": 1}),
        ("a.b.c=1", {"b": {"c": 1}}),
    ],
)
def test_values_are_yaml(text, value):
    assert tree({}, text) == {"a": value}


def test_an_override_replaces_or_adds():
    given = {"steps": 1, "eval": {"every": 5}}
    assert tree(given, "steps=2", "eval.samples=3") == {"steps": 2, "eval": {"every": 5, "samples": 3}}
    assert given == {"steps": 1, "eval": {"every": 5}}


def test_the_last_override_of_a_key_wins():
    assert tree({}, "steps=1", "steps=2") == {"steps": 2}


@pytest.mark.parametrize(
    ("lost", "later"),
    [
        ("algorithm.policy_loss.clip_high=0.3", "algorithm=rloo"),
        ("algorithm.policy_loss.clip_high=0.3", "algorithm.policy_loss=gspo"),
        ("reward[0].weight=2", "reward=[x]"),
        ("reward[0].weight=2", "reward.0=z"),
    ],
)
def test_an_override_that_a_later_one_replaces_is_a_fault(lost, later):
    given = {"algorithm": "grpo", "reward": ["x", "y"]}
    message = fault(given, lost, later)
    assert f"override {lost!r}: has no effect, because {later!r} comes after it and replaces all of" in message
    tree(given, later, lost)  # the other order sets both


@pytest.mark.parametrize("given", [["steps=4"], {"steps": 4}])
def test_an_override_that_is_no_text_is_refused(given):
    with pytest.raises(ConfigError, match=rf"expected texts such as 'steps=20', .*, a {type(given).__name__}"):
        read({}, [given])


def test_overrides_whose_names_only_begin_alike_are_kept():
    assert tree({}, "eval.every=1", "eva=2", "evaluation=3") == {"eval": {"every": 1}, "eva": 2, "evaluation": 3}


def test_what_is_merged_into_a_name_spells_it_out():
    assert tree({"algorithm": "grpo"}, "algorithm.kl_coef=0") == {"algorithm": {"use": "grpo", "kl_coef": 0}}
    part = tree({"algorithm": {"use": "grpo", "policy_loss": "ppo"}}, "algorithm.policy_loss.clip_high=0.3")
    assert part == {"algorithm": {"use": "grpo", "policy_loss": {"use": "ppo", "clip_high": 0.3}}}
    assert tree({"model": "a/b"}, "model.dtype=bfloat16") == {"model": {"path": "a/b", "dtype": "bfloat16"}}
    assert tree({"reward": ["x", "y"]}, "reward.1.weight=2") == {"reward": ["x", {"use": "y", "weight": 2}]}
    assert tree({"reward": ["x", "y"]}, "reward[0].weight=2") == {"reward": [{"use": "x", "weight": 2}, "y"]}
    assert tree({}, "learner.zero_stage=2") == {"learner": {"zero_stage": 2}}


def test_an_item_of_a_list_is_replaced():
    assert tree({"reward": ["x", "y"]}, "reward[1]=z") == {"reward": ["x", "z"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reward[2]=z", "override 'reward[2]=z': reward is a list of 2; '2' is not an index of it"),
        ("reward.first=z", "reward is a list of 2; 'first' is not an index of it"),
        ("steps.every=1", "override 'steps.every=1': steps is 3, which has no keys"),
        ("name.first=a", "name is 'trial', which has no keys"),
        ("in.place.size=2", "in.place is 'hall', which has no keys; for a component, write in.place='{use: hall, size"),
        ("steps", "override 'steps': expected key=value"),
        ("steps: 3", "expected key=value"),
        ("=3", "expected key=value"),
    ],
)
def test_overrides_that_fit_nowhere(text, message):
    assert message in fault({"reward": ["x", "y"], "steps": 3, "name": "trial", "in": {"place": "hall"}}, text)


@pytest.mark.parametrize("text", ["\\", "", " ", "steps=3\\", "steps=3\nbatch_size=4", " steps", "steps\\"])
def test_a_line_that_lost_its_continuation(text):
    assert "shell line that lost its continuation" in fault({}, text)
    assert repr(text) in fault({}, text)


@pytest.mark.parametrize("text", ["stop=[a,", "b]", "{use:", "grpo}", "stop=[a, b", "reward={use: a", "'[a", '"b]"'])
def test_a_list_in_the_wrong_quotes(text):
    assert "in single quotes as a whole: 'key=[a, b]'" in fault({}, text)


def test_dashes_are_not_part_of_a_setting():
    assert "overrides have no dashes: batch_size=…" in fault({}, "--batch_size")


# --- interpolation


def test_references_to_keys_and_to_the_environment(monkeypatch):
    monkeypatch.setenv("RLSDK_TEST_NAME", "blue")
    monkeypatch.setenv("RLSDK_TEST_STEPS", "7")
    given = {
        "batch": 4,
        "half": "${batch}",
        "name": "run-${batch}-${oc.env:RLSDK_TEST_NAME}",
        "steps": "${oc.decode:${oc.env:RLSDK_TEST_STEPS}}",
        "out": "${oc.env:RLSDK_TEST_NOWHERE,runs}",
        "section": {"a": 1, "b": "${.a}"},
        "again": "${section}",
        "list": ["${batch}"],
    }
    assert tree(given) == {
        "batch": 4,
        "half": 4,
        "name": "run-4-blue",
        "steps": 7,
        "out": "runs",
        "section": {"a": 1, "b": 1},
        "again": {"a": 1, "b": 1},
        "list": [4],
    }


def test_an_override_may_refer_and_be_referred_to():
    assert tree({"a": 1, "b": "${a}"}, "a=2", "c=${b}") == {"a": 2, "b": 2, "c": 2}


def test_every_reference_that_leads_nowhere_is_reported(monkeypatch):
    monkeypatch.delenv("RLSDK_TEST_NOWHERE", raising=False)
    given = {
        "name": "${oc.env:RLSDK_TEST_NOWHERE}",
        "steps": "${stepps}",
        "list": [1, "${a.b.c}"],
        "x": {"y": "${x.y}"},
        "good": 1,
        "must": "???",
    }
    found, faults = read(given)
    assert found == {"good": 1, "list": [1], "x": {}}
    by_path = dict(fault.split(": ", 1) for fault in faults)
    assert set(by_path) == {"name", "steps", "list[1]", "x.y", "must"}
    assert by_path["name"].endswith("cannot be resolved: the environment variable RLSDK_TEST_NOWHERE is not set")
    assert by_path["steps"].startswith("'${stepps}' cannot be resolved: Interpolation key 'stepps' not found")


@pytest.mark.parametrize("value", ["${RUN_NAME}", "runs/${env:RUN_NAME}"])
def test_a_variable_written_as_in_a_shell_is_told_how(value):
    (found,) = read({"out": value})[1]
    assert found.startswith(f"out: {value!r} cannot be resolved: ")
    assert found.endswith("; an environment variable is written ${oc.env:RUN_NAME}")


@pytest.mark.parametrize("value", ["${", "${a b}", "cost: ${"])
def test_an_interpolation_that_is_not_one_says_how_to_write_a_dollar_sign(value, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({"name": value}))
    for source in ({"name": value}, file):
        with pytest.raises(ConfigError, match=r"name: .*plain text with a dollar sign \\\${"):
            read(source)
    assert "plain text with a dollar sign" in fault({}, f"name='{value}'")


def test_a_dollar_sign_can_be_written():
    assert tree({"name": r"a\${b}"}) == {"name": "a${b}"}


# --- files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        ("a: [1", "is not valid YAML"),
        ("a: 1\na: 2", "is not valid YAML.*duplicate key"),
        ("- 1\n- 2", "contains a value of type list; expected keys with values at the top level"),
        ("3", "cannot be read|holds"),
        (b"\xff\xfe\x00", "cannot be read|not valid YAML"),
    ],
)
def test_files_that_hold_no_configuration(tmp_path, content, message):
    file = tmp_path / "bad.yaml"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        read(file)
    assert "bad.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1 (a: 3): found duplicate key a; keep one of them"),
        (
            "a:\n  b: 1\n\tc: 2\n",
            "line 3, column 1 (c: 2): found a tab character that violates indentation; indent with spaces",
        ),
        ("a: 1\nsteps 150\nb: 2\n", "line 2, column 1 (steps 150): could not find expected ':'"),
        ("a: *nothing\n", "line 1, column 4 (a: *nothing): found undefined alias; define it above as &nothing"),
        ("a: b: c\n", "line 1, column 5 (a: b: c): mapping values are not allowed in this context; put text that"),
        ("a:\n  b: 1\n c: 2\n", "; indent the keys of a section equally"),
        ("a: 1\nb: [1\nc: 2\n", "; the bracket was opened in line 2"),
        ("a: 1\nb: [1,\n", "line 3, column 1: did not find expected node content; a bracket is not closed"),
    ],
)
def test_a_file_that_is_not_yaml_is_explained_by_line(tmp_path, content, message):
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read(file)
    (found,) = caught.value.faults
    assert message in found and "while " not in found


def test_a_folder_instead_of_a_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is a folder; pass the YAML file in it"):
        read(tmp_path)


def test_an_empty_file_is_an_empty_tree(tmp_path):
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert tree(tmp_path / "a.yaml", "steps=1") == {"steps": 1}


@pytest.mark.parametrize("given", ["file", "override"])
def test_the_section_production_is_read_as_rollout_with_a_warning(caplog, given):
    source = {"name": "run", "batch_size": "${production.sync_interval}"}
    source |= {"production": {"sync_interval": 3}} if given == "file" else {}
    found, faults = read(source, [] if given == "file" else ["production.sync_interval=3"])
    assert not faults
    assert found == {"name": "run", "batch_size": 3, "rollout": {"sync_interval": 3}}
    assert "the section production is now called rollout" in caplog.text


def test_a_section_under_both_of_its_names_is_refused():
    with pytest.raises(ConfigError, match="now called rollout, which is given as well"):
        read({"production": {"oversample": 0.5}, "rollout": {"oversample": 0.5}})


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("+learner.lr=1e-6", "Hydra's + is not needed here; write learner.lr=1e-6"),
        ("++learner.lr=1e-6", "Hydra's + is not needed here; write learner.lr=1e-6"),
        ("~eval", "Hydra's ~ has no counterpart; set eval to a value"),
    ],
)
def test_the_signs_of_hydra_are_explained(text, advice):
    assert advice in fault({"name": "run"}, text)


def test_a_number_alone_is_answered_with_how_a_setting_and_a_step_to_resume_from_are_written():
    advice = "expected key=value; write a value as in steps=200, and the step to resume from as --resume=200"
    assert advice in fault({"name": "run"}, "200")


def test_a_value_that_is_not_utf_8_is_refused():
    assert "expected text in UTF-8" in fault({"name": "run"}, "name=\udcff")


def test_a_file_that_does_not_exist_is_compared_with_its_neighbours(tmp_path):
    (tmp_path / "quickstart.yaml").write_text("name: a\n")
    with pytest.raises(ConfigError, match=r"there is no such file .*; did you mean .*quickstart\.yaml\?"):
        read(tmp_path / "quikstart.yml")
    with pytest.raises(ConfigError, match=r"folder: \S+/\)$"):
        read(tmp_path / "nowhere" / "quickstart.yml")
