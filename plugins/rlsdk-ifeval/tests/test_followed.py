"""Answers that follow instructions of each kind, tasks that do not say what they demand, and hostile answers."""

from __future__ import annotations

import json

import pytest
from rlsdk_ifeval.followed import followed

import rlsdk
from rlsdk.errors import DataError
from rlsdk.testing import HOSTILE
from rlsdk.types import Rollout, Task

FOLLOWED = {
    "keywords:existence": ({"keywords": ["tide", "moon"]}, "The moon pulls the tide.", "The sea rises."),
    "keywords:frequency": (
        {"keyword": "sea", "frequency": 2, "relation": "at least"},
        "The sea, the sea!",
        "The sea, the lake!",
    ),
    "keywords:forbidden_words": ({"forbidden_words": ["boat"]}, "A ship sails.", "A boat sails."),
    "keywords:letter_frequency": (
        {"letter": "z", "let_frequency": 2, "let_relation": "at least"},
        "A puzzle.",
        "A maze.",
    ),
    "language:response_language": (
        {"language": "de"},
        "Das Meer steigt mit dem Mond, und dann fällt es wieder.",
        "The sea rises with the moon, and then it falls again.",
    ),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "One\n***\nTwo", "One\n***\nTwo\n***\nThree"),
    "length_constraints:number_words": (
        {"num_words": 4, "relation": "at least"},
        "One two three four",
        "One two three",
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "It rises.\n\nThen it falls.",
        "It rises.\n\nIt falls.",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "Dear [name], come at [time].", "Dear [name]."),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Come.\nP.S. Bring salt.", "Come. Bring salt."),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* one\n* two", "* one"),
    "detectable_format:constrained_response": ({}, "My answer is yes.", "Surely."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*high* and *low*", "*high* and low"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\nhigh\nSection 2\nlow",
        "Section 1\nhigh",
    ),
    "detectable_format:json_format": ({}, '{"tide": "high"}', "tide: high"),
    "detectable_format:title": ({}, "<<The tide>>\nIt rises.", "The tide\nIt rises."),
    "combination:two_responses": ({}, "High.\n******\nLow.", "High. Low."),
    "combination:repeat_prompt": (
        {"prompt_to_repeat": "What is the tide?"},
        "What is the tide? The sea that rises.",
        "The sea that rises.",
    ),
    "startend:end_checker": ({"end_phrase": "That is all."}, "It rises. That is all.", "It rises."),
    "change_case:english_capital": ({}, "THE SEA RISES WITH THE MOON AND FALLS AGAIN", "The sea rises."),
    "change_case:english_lowercase": ({}, "the sea rises with the moon and falls again", "The sea rises."),
    "punctuation:no_comma": ({}, "It rises and falls", "It rises, and falls"),
    "startend:quotation": ({}, '"It rises."', "It rises."),
}
"""Instruction -> its arguments, an answer that follows it, and one that does not."""
SENTENCES = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}
"""Instructions that need NLTK's data."""


def task_of(names, arguments):
    return Task("t", "Write about the sea.", metadata={"instruction_id_list": names, "kwargs": arguments})


def scored(task, text, **options):
    return rlsdk.load("reward", followed, **options)(Rollout.from_text(task, text))


@pytest.mark.parametrize("name", FOLLOWED)
def test_each_instruction_tells_an_answer_that_follows_it(name):
    arguments, good, bad = FOLLOWED[name]
    task = task_of([name], [arguments])
    right, wrong = scored(task, good), scored(task, bad)
    assert (right.value, dict(right.metrics), right.reason) == (1.0, {"instructions": 1.0, "all": 1.0}, "")
    assert (wrong.value, wrong.valid, wrong.reason) == (0.0, True, f"not followed: {name}")


def test_all_instructions_of_the_library_are_among_them():
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

    assert set(FOLLOWED) | SENTENCES == set(INSTRUCTION_DICT)


def test_the_score_is_the_share_or_all_or_nothing():
    task = task_of(["punctuation:no_comma", "detectable_format:json_format"], [{}, {}])
    half = scored(task, "no json")
    assert (half.value, dict(half.metrics)) == (0.5, {"instructions": 0.5, "all": 0.0})
    assert scored(task, "no json", partial=False).value == 0.0
    assert scored(task, '{"a": 1}', partial=False).value == 1.0
    assert scored(task, "").reason == "not followed: punctuation:no_comma, detectable_format:json_format"


def test_loose_forgives_the_first_and_the_last_line():
    task = task_of(["punctuation:no_comma"], [{}])
    answer = "Sure, here it is:\nIt rises"
    assert (scored(task, answer).value, scored(task, answer, mode="loose").value) == (0.0, 1.0)


def test_thoughts_are_no_part_of_the_answer():
    task = task_of(["punctuation:no_comma"], [{}])
    assert scored(task, "<think>well, well</think>It rises").value == 1.0
    assert scored(task, "<think>well it rises and never ends").value == 0.0


def test_rows_of_the_published_data_have_the_arguments_of_all_instructions():
    """As in parquet, where one without a value is null; other files hold both columns as JSON."""
    names = ["punctuation:no_comma", "length_constraints:number_words"]
    arguments = [
        {"num_words": None, "relation": None, "keywords": None},
        {"num_words": 2.0, "relation": "at least", "keywords": None},
    ]
    assert scored(task_of(names, arguments), "It rises").value == 1.0
    assert scored(task_of(json.dumps(names), json.dumps(arguments)), "Rises").value == 0.5


@pytest.mark.parametrize(
    ("names", "arguments", "said"),
    [
        (["punctuation:no_coma"], [{}], "unknown instruction 'punctuation:no_coma'; did you mean 'punctuation:no_com"),
        (["count:odd"], [{}], "unknown instruction 'count:odd'; known are: keywords:existence, "),
        (["length_constraints:number_words"], [{"num_words": 3}], "takes the arguments: num_words, relation; kwargs h"),
        (
            ["keywords:letter_frequency"],
            [{"letter": "#", "let_frequency": 1, "let_relation": "at least"}],
            "keywords:letter_frequency does not accept letter='#'",
        ),
        (
            ["length_constraints:number_words"],
            [{"num_words": 3, "relation": "more than"}],
            "does not accept its arguments {'num_words': 3, 'relation': 'more than'}: ",
        ),
        (["punctuation:no_comma"], [{"keywords": ["a"]}], "takes the arguments: none; kwargs has: keywords"),
        (["punctuation:no_comma"], [], "1 instruction_id_list and 0 kwargs"),
        ([], [], "0 instruction_id_list and 0 kwargs"),
        ("no list", [{}], "needs the metadata instruction_id_list, a list or a list as JSON; it has: instruction_id_l"),
        (None, [{}], "needs the metadata instruction_id_list"),
    ],
)
def test_a_task_that_does_not_say_what_it_demands_is_an_error(names, arguments, said):
    """The library would leave out what it does not know, and draw a missing argument by chance."""
    with pytest.raises(DataError, match=r"task 't'") as error:
        scored(task_of(names, arguments), "It rises")
    assert said in str(error.value)


def test_missing_data_of_nltk_is_told(monkeypatch):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    task = task_of(["length_constraints:number_sentences"], [{"num_sentences": 3, "relation": "at least"}])
    with pytest.raises(DataError, match=r"length_constraints:number_sentences need.* nltk\.downloader"):
        scored(task, "It rises. It falls.")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_answers_get_a_score(text):
    task = task_of(list(FOLLOWED), [arguments for arguments, _, _ in FOLLOWED.values()])
    found = scored(task, text)
    assert found.valid
    assert found.value == scored(task, text).value < 1
