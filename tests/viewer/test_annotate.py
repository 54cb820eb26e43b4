"""The annotation queue: questions, stored answers, and permissions; then a person's clicks and keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.annotations import ANNOTATIONS, AnnotationFile
from rlsdk.runlog.tables import Entry
from rlsdk.types import Group, Score, Task
from rlsdk.viewer import annotating
from rlsdk.viewer.service import ViewerService
from tests.viewer.browser import Browser, chromium, served
from tests.viewer.recorded import HOSTILE, fill, group, make_run, rollout

Ask = Callable[..., Any]


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that does much else, the search for questions would end after a group."""
    monkeypatch.setattr(annotating, "SECONDS", 60.0)


@pytest.fixture
def service(run: Path) -> ViewerService:
    return ViewerService([str(run)])


def path(service: ViewerService, query: str = "by=ann", rest: str = "") -> str:
    (key,) = service._runs
    return f"/api/annotate/{key}{rest}" + (f"?{query}" if query else "")


def test_each_group_gives_one_pair_of_different_answers(service: ViewerService, ask: Ask) -> None:
    status, _, found = ask(service, path(service))
    assert (status, found["left"], found["counted"], found["done"], found["made"]) == (200, 12, True, True, 0)
    assert [item[0][0] for item in found["items"]] == list(range(11, -1, -1))
    assert all(len(item) == 2 and item[0][0] == item[1][0] and item[0][1] != item[1][1] for item in found["items"])
    sides = {item[0][1] < item[1][1] for item in found["items"]}
    assert sides == {True, False}  # a side says nothing of the position in the group
    assert ask(service, path(service))[2]["items"] == found["items"]


def test_scores_ask_for_each_rollout_in_portions(service: ViewerService, ask: Ask) -> None:
    first = ask(service, path(service, "by=ann&ask=score&order=oldest"))[2]
    assert (first["items"][:4], first["left"], first["done"]) == ([[[0, 0]], [[0, 1]], [[0, 2]], [[1, 0]]], 36, False)
    cursor = json.dumps(first["next"])
    second = ask(service, path(service, f"by=ann&ask=score&order=oldest&cursor={cursor}"))[2]
    assert second["items"][0] == [[first["items"][-1][0][0] + 1, 0]]
    assert second["left"] == 36 - len(first["items"])


def test_conditions_narrow_the_queue(service: ViewerService, ask: Ask, run: Path) -> None:
    task = Task("sums/even", "all the same?", source="sums")
    same = Group(task, [rollout(task, text) for text in ("a", "b")], [Score(1.0), Score(1.0)], uid="even")
    fill(run, [Entry(number=90, source="sums", state="trained", step=7, uses=1, group=same)])

    def groups(query: str) -> list[int]:
        return [item[0][0] for item in ask(service, path(service, f"by=ann&{query}"))[2]["items"]]

    assert groups("step_from=7") == [90]
    assert groups("step_from=7&disagree=1") == []
    assert groups("step_from=6&disagree=1") == [11, 10]
    assert groups("source=words&step_to=2") == [2, 0]
    assert groups("kind=eval") == []  # one answer to each held-out task: there is nothing to compare
    assert len(groups("ask=score&reward_from=1&step_to=1")) == 2


def test_what_is_kept_is_left_out_of_the_queue_of_that_person_alone(
    service: ViewerService, ask: Ask, run: Path
) -> None:
    first, second = ask(service, path(service))[2]["items"][:2]
    made = {"kind": "pair", "value": "second", "by": "ann", "places": first}
    assert ask(service, path(service, ""), method="POST", content=made)[0] == 200
    skipped = {"kind": "skip", "value": "pair", "by": "ann", "places": second}
    assert ask(service, path(service, ""), method="POST", content=skipped)[0] == 200
    again = ask(ViewerService([str(run)]), path(service))[2]  # a viewer that is started again goes on there
    assert (again["left"], again["made"]) == (10, 1)
    assert first not in again["items"] and second not in again["items"]
    assert ask(service, path(service, "by=bob"))[2]["left"] == 12
    assert ask(service, path(service, "by=ann&ask=score"))[2]["left"] == 36
    kept, _ = AnnotationFile(run).read()
    assert [(each.number, each.index) for each in kept.rollouts] == [tuple(place) for place in first]
    assert (kept.task["prompt"], kept.task["answer"], kept.value) == ("What is 11?", 11, "second")
    [task] = rlsdk.load("tasks", "annotations", path=str(run), take="pairs")()
    assert task.metadata["chosen"] == kept.rollouts[1].answer


def test_undo_takes_back_one_after_the_other(service: ViewerService, ask: Ask, run: Path) -> None:
    items = ask(service, path(service, "by=ann&ask=edit"))[2]["items"][:2]
    for item, value in zip(items, ("five", "six"), strict=True):
        made = {"kind": "edit", "value": value, "by": "ann", "places": item}
        ask(service, path(service, ""), method="POST", content=made)
    for item in reversed(items):
        found = ask(service, path(service, "", "/undo"), method="POST", content={"by": "ann"})[2]
        assert found == {"item": item, "ask": "edit", "kind": "edit"}
    assert ask(service, path(service, "", "/undo"), method="POST", content={"by": "ann"})[2] == {"item": None}
    assert AnnotationFile(run).read() == ()


def test_a_rollout_that_took_the_place_of_another_is_asked_about_again(
    service: ViewerService, ask: Ask, run: Path
) -> None:
    made = {"kind": "score", "value": 1, "by": "ann", "places": [[11, 0]]}
    ask(service, path(service, ""), method="POST", content=made)
    query = "by=ann&ask=score&step_from=6"
    assert [[11, 0]] not in ask(service, path(service, query))[2]["items"]
    other = group(11, answers=("another answer", "no"))
    fill(run, [Entry(number=11, source="sums", state="trained", step=6, uses=1, group=other)])
    assert [[11, 0]] in ask(service, path(service, query))[2]["items"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"kind": "pair", "value": "third", "by": "ann", "places": [[1, 0], [1, 1]]}, "expected first, second or same"),
        ({"kind": "pair", "value": "first", "by": "ann", "places": [[1, 0], [2, 0]]}, "two of one group"),
        ({"kind": "score", "value": 1, "by": "ann", "places": [[1, 9]]}, "group 1 has 3 rollouts"),
        ({"kind": "score", "value": 1, "by": "ann", "places": [[77, 0]]}, "there is no group 77"),
        ({"kind": "score", "value": 1, "by": "ann", "places": [[1, -1]]}, "expected the number of a group"),
        ({"kind": "score", "value": 1, "by": " ", "places": [[1, 0]]}, "annotator's name, 1 to 80 characters"),
        ({"kind": "score", "value": [1], "by": "ann", "places": [[1, 0]]}, "a finite number or a label"),
        ({"kind": "delete", "value": 1, "by": "ann", "places": [[1, 0]]}, "kind is 'delete'"),
        ([1], "not an object"),
    ],
)
def test_a_wrong_annotation_is_refused_and_nothing_is_kept(
    service: ViewerService, ask: Ask, run: Path, content: Any, message: str
) -> None:
    status, _, found = ask(service, path(service, ""), method="POST", content=content)
    assert status == 400 and message in found["error"]
    assert not (run / ANNOTATIONS).exists()


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_another_sites_page_cannot_annotate(service: ViewerService, ask: Ask, run: Path, origin: str) -> None:
    made = {"kind": "score", "value": 1, "by": "ann", "places": [[1, 0]]}
    for rest in ("", "/undo"):
        answer = ask(service, path(service, "", rest), method="POST", content=made, headers={"Origin": origin})
        assert answer[0] == 403
    assert not (run / ANNOTATIONS).exists()


def test_a_form_of_another_kind_is_refused(service: ViewerService, ask: Ask) -> None:
    answer = ask(service, path(service, ""), method="POST", headers={"Content-Type": "text/plain"})
    assert answer[0] == 400 and "expected application/json" in answer[2]["error"]


# The page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.mark.slow
def test_a_person_compares_scores_and_corrects_with_keys(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    file = AnnotationFile(run)

    def kept(count: int) -> list[tuple[str, Any]]:
        browser.wait(lambda: len(file.read()) == count, f"not {count} annotations but {file.read()}")
        return [(each.kind, each.value) for each in file.read()]

    with served(run) as address:
        browser.size(1280, 900)
        browser.open(f"{address}#/annotate")
        field = browser.see("input[name=by]")
        field.clear()
        field.send_keys("ann\ue00c")  # escape: the next keys are the page's
        browser.see(".annotate-progress", "0 done, 12 left")
        browser.see(".question .column", "A")
        browser.keys("1")
        browser.see(".annotate-progress", "1 done, 11 left")
        browser.keys("\ue014")  # arrow right
        browser.see(".annotate-progress", "2 done, 10 left")
        browser.keys("s")
        browser.see(".annotate-progress", "2 done, 9 left")
        assert kept(3) == [("pair", "first"), ("pair", "second"), ("skip", "pair")]
        browser.keys("zz")
        browser.see(".annotate-progress", "1 done, 11 left")
        browser.keys("3")
        browser.see(".annotate-progress", "2 done, 10 left")
        assert kept(2) == [("pair", "first"), ("pair", "same")]
        browser.screenshot("view-annotate")
        browser.open(f"{address}#/annotate")  # it goes on where it stopped
        browser.see(".annotate-progress", "2 done, 10 left")
        browser.click(".choice button", "Score")
        browser.see(".annotate-progress", "0 done, 36 left")
        browser.keys("4")
        browser.see(".annotate-progress", "1 done, 35 left")
        labels = browser.see("input[name=labels]")
        labels.send_keys("wrong, right\ue007")
        browser.see(".verdict button", "right")
        labels = browser.see("input[name=labels]")
        browser.run("document.activeElement.blur()")
        browser.see(".question .column")
        browser.keys("\ue014")
        browser.see(".verdict .button.on", "wrong")
        browser.keys("\ue014\ue007")
        browser.see(".annotate-progress", "2 done, 34 left")
        assert kept(4)[2:] == [("score", 4), ("score", "right")]
        browser.click(".choice button", "Correct")
        browser.see("#edit-field")
        browser.keys("e")
        browser.driver.switch_to.active_element.send_keys(" it is five")
        browser.driver.switch_to.active_element.send_keys("\ue009\ue007")  # control and enter
        browser.see(".annotate-progress", "1 done, 35 left")
        [edit] = kept(5)[4:]
        assert edit[0] == "edit" and edit[1].endswith(" it is five")
        browser.size(390, 844)
        assert browser.run("return document.documentElement.scrollWidth") <= 390
        assert browser.errors() == []


@pytest.mark.slow
def test_a_hostile_rollout_is_shown_and_never_acts(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    with served(run) as address:
        browser.size(1280, 900)
        browser.errors()
        browser.open(f"{address}#/annotate?ask=edit&task=sums/3&order=oldest")
        browser.see(".question .turn.policy", "yes")
        browser.keys("s")
        browser.see(".question .turn.policy", "<script>document.title='owned'</script>")
        browser.keys("r1")
        browser.see(".annotate-progress", "1 done")
        assert browser.run("return document.querySelectorAll('main script, main img').length") == 0
        assert browser.run("return document.title") == "first · rlsdk"
        edit = AnnotationFile(run).read()[-1]
        assert edit.value == HOSTILE.replace("\ud800", "\ufffd") or edit.value == HOSTILE
        assert browser.errors() == []
