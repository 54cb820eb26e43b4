"""`rlsdk config`: keys, types, defaults, units and meanings."""

from __future__ import annotations

import json

from click.testing import CliRunner

from rlsdk.cli import root


def run(*arguments, status=0, width=80):
    ran = CliRunner().invoke(root, ["config", *arguments], env={"COLUMNS": str(width)})
    assert ran.exit_code == status, ran.stderr
    return ran.stdout if status == 0 else ran.stderr


def test_a_section():
    text = run("canary")
    assert "canary.tokens" in text
    assert "int >= 2 = 32, tokens" in text
    assert "placement" not in text


def test_at_80_columns_no_line_is_longer_or_ends_with_blanks():
    lines = run().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_component_shows_the_options_of_the_default():
    text = " ".join(run("learner").split())
    assert "learner = deepspeed" in text
    assert "learner.lr" in text
    assert "learner: deepspeed" in text  # the names of all
    assert " ".join(run("rollout.stop").split()).startswith("rollout.stop")


def test_as_json():
    (found,) = json.loads(run("sampling.temperature", "--json"))
    assert found == {
        "path": "sampling.temperature",
        "type": "float",
        "required": False,
        "default": 1.0,
        "unit": "factor",
        "help": "Softmax temperature, above 0; the learner divides its logits by the same value.",
    }
    whole = {each["path"]: each for each in json.loads(run("--json"))}
    assert whole["name"]["required"] is True
    assert whole["tasks.train.weight"]["default"] == 1.0


def test_an_unknown_section_is_answered_with_what_was_meant():
    assert "did you mean 'sampling.seeds'?" in run("seeds", status=1)
    assert "did you mean 'eval.every' or 'checkpoint.every'?" in run("every", status=1)
    assert "did you mean 'placement'?" in run("placment", status=1)
    assert "sections: model, " in run("xyzzy", status=1)
    assert "did you mean 'learner.lr'?" in run("learner.lrr", status=1)
