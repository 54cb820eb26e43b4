"""The table of batch fields agrees with the input classes, and `needs=` is checked against it."""

from __future__ import annotations

import subprocess
import sys

import attrs
import pytest

import rlsdk
from rlsdk import fields
from rlsdk.batch import CreditInputs, LossInputs
from rlsdk.components import own_mark
from rlsdk.errors import PluginError

INPUTS = {"credit": CreditInputs, "loss": LossInputs}


@pytest.mark.parametrize("inputs", INPUTS)
def test_the_table_holds_the_fields_of_the_inputs(inputs):
    held = {field.name: field for field in attrs.fields(INPUTS[inputs]) if not field.name.startswith("_")}
    assert set(fields.names(inputs)) == set(held)
    required = {name for name, field in held.items() if field.default is attrs.NOTHING}
    assert required <= set(fields.names(inputs, access="always"))


def test_every_field_is_declared_once_and_can_be_read():
    declared = [field.name for field in fields.FIELDS]
    assert len(declared) == len(set(declared))
    context = {field.name for field in fields.FIELDS if field.axis == "context"}  # the learner's model reads these
    assert {name for name in declared if not fields.readers(name)} == context == {"routed_experts"}


@pytest.mark.parametrize("kind", fields.READS)
def test_every_field_of_its_inputs_may_be_needed(kind):
    readable = fields.names(fields.READS[kind])

    @getattr(rlsdk, kind)("reads_all", needs=readable)
    def reads_all(x): ...

    assert own_mark(reads_all).needs == readable


@pytest.mark.parametrize(
    ("kind", "field", "message"),
    [
        ("advantage", "ref_logprob", "unknown field 'ref_logprob', did you mean 'ref_logprobs'"),
        ("shaping", "refl_logprobs", "did you mean 'ref_logprobs'"),
        ("policy_loss", "teacher_topk", "unknown field 'teacher_topk'"),
        ("advantage", "lateness", "give the function marked @rlsdk.field('lateness') in place of its name"),
        ("correction", "policy_versions", "unknown field 'policy_versions'"),
        ("advantage", "pairs", "only policy_loss and correction can read 'pairs'"),
        ("policy_loss", "baseline_rewards", "only shaping and advantage can read 'baseline_rewards'"),
    ],
)
def test_an_unreadable_field_is_refused_when_the_component_is_marked(kind, field, message):
    with pytest.raises(PluginError) as caught:
        getattr(rlsdk, kind)("x", needs=("entropy", field))
    assert str(caught.value).startswith(f"@rlsdk.{kind}('x', needs=('entropy', {field!r})): ")
    assert message in str(caught.value)


def test_needs_given_as_text_is_refused():
    for mark in (rlsdk.advantage, rlsdk.field):
        with pytest.raises(PluginError, match=r"write needs=\('entropy',\)"):
            mark("x", needs="entropy")


def test_a_field_that_would_hide_a_method_of_the_inputs_is_refused():
    held = {name for inputs in INPUTS.values() for name in dir(inputs) if not name.startswith("_")}
    held |= {field.name.lstrip("_") for inputs in INPUTS.values() for field in attrs.fields(inputs)}
    assert held - {field.name for field in fields.FIELDS} == fields.HELPERS
    with pytest.raises(PluginError, match=r"@rlsdk.field\('group_mean'\): .* attribute of this name; choose another"):
        rlsdk.field("group_mean")


def test_a_field_without_a_name_is_told_to_have_one():
    def lateness(batch): ...

    with pytest.raises(PluginError, match=r"takes a name; write @rlsdk\.field\('lateness'\) above lateness"):
        rlsdk.field(lateness)
    with pytest.raises(PluginError, match=r"@rlsdk\.field takes a name"):
        rlsdk.field()


@pytest.mark.parametrize("options", ["*, path", "path", "path='a'"])
def test_a_field_with_options_that_no_config_can_set_is_refused(options):
    produce = eval(f"lambda batch, {options}: None")
    with pytest.raises(PluginError, match=r"called as late\(batch\), but is .*path.*\*, each with a default"):
        rlsdk.field("late")(produce)


def test_a_field_that_takes_no_batch_is_refused():
    with pytest.raises(PluginError, match=r"called as late\(batch\), but is defined as \(\)"):
        rlsdk.field("late")(lambda: None)


def test_a_field_may_have_a_cache_among_its_arguments():
    def late(batch, *args, _cache={}, **more): ...  # noqa: B006

    assert rlsdk.field("late")(late) is late


def test_the_table_and_the_marks_load_no_torch():
    code = "import sys, rlsdk; rlsdk.advantage('x', needs=('entropy',)); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
