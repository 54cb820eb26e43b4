"""Images in messages: values, parts, and their form in stores and workers."""

from __future__ import annotations

import io
import json
import pickle

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlsdk
from rlsdk.errors import ValueFault
from rlsdk.runlog.serialization import decode, encode
from rlsdk.types import Group, Image, Message, Observation, Rollout, Score, Task


def pixels(seed: int = 0, height: int = 3, width: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def png(seed: int = 0) -> bytes:
    from PIL import Image as Pillow

    out = io.BytesIO()
    Pillow.fromarray(pixels(seed)).save(out, format="PNG")
    return out.getvalue()


def test_an_image_is_made_of_bytes_a_url_a_picture_or_an_array() -> None:
    from PIL import Image as Pillow

    first = Image(png())
    assert np.array_equal(np.asarray(first.open()), pixels())
    assert Image(first.url) == first == Image(first) == Image(Pillow.fromarray(pixels())) == Image(pixels())
    assert Image(pixels(1)) != first
    assert repr(first) == f"Image(png, {len(first.data)} bytes, {first.digest[:8]})"


def test_the_hash_of_an_image_is_of_its_bytes_and_survives_a_pickle() -> None:
    image = Image(b"\x89PNG\r\n\x1a\n rest")
    assert image.digest == "7979c99964fd05fdefbd654b9c7ce506"
    assert pickle.loads(pickle.dumps(image)) == image
    assert pickle.loads(pickle.dumps(image)).digest == image.digest


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        (b"no image", "8 bytes that begin with b'no image' are not a PNG, JPEG, WebP or GIF"),
        ("cat.png", r"'cat\.png' is not a data URL"),
        ("https://example.org/cat.png", "is not a data URL"),
        ("data:image/png;base64,&&", "cannot be read"),
        (np.zeros((2, 2)), r"float64 \[2, 2\] given; expected the bytes of an image file"),
        (3, "int given"),
    ],
)
def test_anything_else_is_refused(given_: object, said: str) -> None:
    with pytest.raises(ValueFault, match=said):
        Image(given_)


def test_parts_are_read_in_openai_form() -> None:
    image = Image(pixels())
    content = [
        {"type": "text", "text": "Look: "},
        {"type": "image", "image": pixels()},
        {"type": "image_url", "image_url": {"url": image.url}},
        " where?",
    ]
    message = Message("user", content)
    assert message.content == ("Look: ", image, image, " where?")
    assert message.text == "Look: <image><image> where?"
    assert message.images == (image, image)
    assert hash(message) == hash(rlsdk.Message("user", ("Look: ", image, image, " where?")))
    assert Message("user", "text").content == Message("user", "text").text == "text"
    assert Message("user", "text").images == ()


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image"}, "a part of type 'image' with type"),
        ({"type": "audio", "audio": "…"}, "a part of type 'audio' with type, audio"),
        ({"text": "no type"}, "a value of type dict"),
        (3, "a value of type int"),
    ],
)
def test_unknown_parts_are_refused(part: object, said: str) -> None:
    with pytest.raises(ValueFault, match=said):
        Message("user", [part])


parts = st.lists(st.one_of(st.text(max_size=5), st.integers(0, 3).map(lambda seed: Image(pixels(seed)))), max_size=4)


@settings(max_examples=30, deadline=None)
@given(parts)
def test_messages_survive_json(content: list[str | Image]) -> None:
    message = Message("user", content)
    assert Message.from_json(json.loads(json.dumps(message.as_json()))).content == (message.content or "")


def rollout() -> Rollout:
    image = Image(pixels())
    task = Task("t", (Message("user", ("1", image)),))
    messages = (*task.prompt, Message("assistant", "2"), Message("user", (image, "3")))
    mask = np.array([False, False, False, True])
    return Rollout(task, messages, np.arange(4), mask, mask * -1.0, mask - 1, image_positions=[1, 2])


def test_a_rollout_has_the_images_of_its_messages_and_their_places() -> None:
    made = rollout()
    assert made.images == (Image(pixels()), Image(pixels()))
    assert made.image_positions.tolist() == [1, 2]
    assert not made.image_positions.flags.writeable
    assert pickle.loads(pickle.dumps(made)).image_positions.tolist() == [1, 2]
    assert Rollout.from_text(made.task, "5").image_positions.tolist() == []
    with pytest.raises(ValueFault, match="image_positions from 2 to 4; it has 4 tokens"):
        attrs.evolve(made, image_positions=[2, 4])


def test_stored_groups_keep_images() -> None:
    made = rollout()
    plain = Rollout(made.task, made.task.prompt, *(np.arange(2) for _ in range(4)))
    group = Group(made.task, (made, plain), (Score(1.0), Score(0.0)))
    again = decode(encode(group))
    assert again.task == group.task
    assert [r.messages for r in again.rollouts] == [r.messages for r in group.rollouts]
    assert [r.image_positions.tolist() for r in again.rollouts] == [[1, 2], []]


def test_an_observation_shows_its_image_before_its_text() -> None:
    image = Image(pixels())
    assert Observation("text").content == "text"
    assert Observation("text", image=pixels()).content == (image, "text")
    assert Observation("", image=image).content == (image,)


def test_an_observation_of_an_environment_in_a_separate_process_keeps_its_image() -> None:
    from rlsdk.environments.subprocess_env import _observed

    observation = Observation("text", "state", pixels())
    assert Observation(**json.loads(json.dumps(_observed(observation)))) == observation
    assert Observation(**json.loads(json.dumps(_observed(Observation("t"))))) == Observation("t")
