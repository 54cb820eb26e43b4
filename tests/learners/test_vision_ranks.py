"""Vision-language models on several ranks: a rank without images takes the same steps as one with some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsdk.contracts import LossSpec, Model, Roles, TrainBatch
from rlsdk.plugins import Plugins
from rlsdk.types import Image
from rlsdk.vision import Vision
from tests.vision_models import make

pytestmark = [pytest.mark.stack, pytest.mark.slow]
ROLLOUTS = ([(28, 28)], [], [(28, 56), (70, 40)], [])
"""Sizes of the images of each rollout."""


def batch_of(model: Model) -> TrainBatch:
    vision, random = Vision(model), np.random.default_rng(0)
    pictures = [
        tuple(Image(random.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes) for sizes in ROLLOUTS
    ]
    shown = [
        [token for image in images for token in [*[vision.token] * vision.count(image), 11]] for images in pictures
    ]
    prompts = [[10, *tokens] for tokens in shown]
    answers = [random.integers(10, 100, 9) for _ in prompts]
    ids = [np.concatenate(pair) for pair in zip(prompts, answers, strict=True)]
    total = sum(map(len, answers))
    return TrainBatch(
        token_ids=np.concatenate(ids),
        lengths=np.array([len(each) for each in ids]),
        starts=np.array([len(each) for each in prompts]),
        responses=np.array([len(each) for each in answers]),
        loss_mask=np.ones(total, bool),
        tokens={
            "old_logprobs": np.full(total, -4.0, np.float32),
            "behaviour_logprobs": np.full(total, -4.0, np.float32),
            "advantages": random.normal(size=total).astype(np.float32),
        },
        context={"image_mask": np.concatenate(ids) == vision.token},
        images=tuple(pictures),
    )


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_ranks_that_share_a_model_by_zero_learn_what_one_rank_does(
    kind: str, launch: Callable[..., Any], tmp_path: Path
) -> None:
    make(tmp_path, kind)
    model = Model(path=str(tmp_path), max_length=96)
    batch, loss = batch_of(model), LossSpec(policy_loss=Plugins().reference("policy_loss", "ppo"))
    found = []
    for world, stage in ((1, 1), (2, 2), (2, 3)):
        group = launch(
            world, Roles(actor=model), loss, zero_stage=stage, lr=1e-2, eps=1e-2, rows="padded", micro_batch_tokens=20
        )
        # Two updates of two rollouts each: in every one of them one rank has no image.
        metrics = [group.update(batch, [np.array([0, 1]), np.array([3, 2])], step) for step in range(2)]
        found.append((metrics, group.logprobs(batch, "actor", ["logprobs"])["logprobs"], group.fetch_weights(1)))
    (first, logprobs, weights), *others = found
    assert all(each["actor/grad_norm"] > 0 for each in first)
    towers = [name for name in weights.tensors if "visual" in name or "vision_tower" in name]
    assert towers
    for metrics, other, sent in others:
        assert sent.tensors.keys() == weights.tensors.keys()
        assert [each["actor/grad_norm"] for each in metrics] == pytest.approx(
            [each["actor/grad_norm"] for each in first], rel=1e-3
        )
        np.testing.assert_allclose(other, logprobs, atol=1e-4)
        for name in towers:
            np.testing.assert_allclose(sent.tensors[name], weights.tensors[name], atol=5e-5, err_msg=name)
