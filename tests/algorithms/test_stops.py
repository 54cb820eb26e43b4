"""Stop rules: how much of a batch is enough."""

import pytest

import rlsdk


@pytest.mark.parametrize(
    ("share", "least"),
    [(0.5, 5), (0.75, 8), (0.01, 1), (1.0, 10), (3.0, 10), (-1.0, 1)],
)
def test_a_share_of_the_batch_is_enough(share, least):
    rule = rlsdk.load("stop", "enough", share=share)
    assert [n for n in range(11) if rule(available=n, target=10)] == list(range(least, 11))


def test_a_share_that_makes_a_whole_number_is_that_number():
    for share, target, least in ((0.55, 20, 11), (0.07, 100, 7), (0.8, 35, 28)):
        rule = rlsdk.load("stop", "enough", share=share)
        assert rule(available=least, target=target) and not rule(available=least - 1, target=target)


def test_all_waits_for_all():
    rule = rlsdk.load("stop", "all")
    assert [n for n in range(5) if rule(available=n, target=4)] == [4]


def test_arguments_of_each_call_are_not_options():
    component = rlsdk.plugins.Plugins().find("stop", "enough")[1]
    assert [option.name for option in component.options] == ["share"]
