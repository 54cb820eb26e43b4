"""Vision-language models: names of their weights, exports, and critics."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from rlsdk.contracts import ActorSpec, Model, TrainBatch
from rlsdk.conversion import compare, read_header, trained_shapes, without_weights
from rlsdk.engines.transformers import Transformers
from rlsdk.learners.export import WeightExporter
from rlsdk.learners.model import load_critic, load_policy
from rlsdk.learners.ranks import Ranks
from rlsdk.learners.rows import empty_rows, to_rows
from rlsdk.learners.zero import full_tensors
from rlsdk.types import Image
from rlsdk.vision import Vision
from tests.vision_models import KINDS, make

IDS = np.arange(10, 40)


def batch(model: Model) -> TrainBatch:
    """A rollout of a picture and 30 tokens."""
    vision = Vision(model)
    image = Image(np.random.default_rng(0).integers(0, 255, (28, 28, 3), dtype=np.uint8))
    ids = np.concatenate([[10], [vision.token] * vision.count(image), IDS])
    length = len(ids)
    return TrainBatch(
        token_ids=ids,
        lengths=np.array([length]),
        starts=np.array([6]),
        responses=np.array([length - 6]),
        loss_mask=np.ones(length - 6, bool),
        context={"image_mask": ids == vision.token},
        images=((image,),),
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_bear_the_names_of_the_checkpoint_and_reach_the_engine(kind: str, tied: bool, tmp_path: Path) -> None:
    make(tmp_path / "model", kind, tied=tied)
    model = Model(path=str(tmp_path / "model"), max_length=96)
    held = read_header(model.path)
    assert held is not None
    assert trained_shapes(model) == held
    assert not compare(without_weights(model), held)
    policy = load_policy(model, "sdpa", False)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    (-policy(to_rows(batch(model), "padded"))[0].mean()).backward()
    optimizer.step()
    exporter = WeightExporter(policy.model, model, Ranks(0, 1, "cpu"), None, partial(full_tensors, policy.model))
    weights = exporter.weights(1)
    assert weights is not None
    assert {name: tuple(array.shape) for name, array in weights.tensors.items()} == held
    engine = Transformers()
    engine.start(model, ActorSpec(role="engine"))
    before = engine.logprobs(IDS)
    engine.load_weights(weights)
    assert np.abs(engine.logprobs(IDS) - before).max() > 1e-3
    ours, theirs = policy.model.state_dict(), engine.net.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    exporter.export(tmp_path / "export")
    assert read_header(str(tmp_path / "export")) == held
    image = Image(np.zeros((40, 60, 3), np.uint8))
    old, new = Vision(model), Vision(Model(path=str(tmp_path / "export")))
    assert old.pixels(image)["pixel_values"].equal(new.pixels(image)["pixel_values"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_sees_and_a_rank_without_rollouts_runs_the_same_modules(kind: str, tmp_path: Path) -> None:
    make(tmp_path, kind)
    model = Model(path=str(tmp_path), max_length=96)
    critic = load_critic(model, "sdpa", False, "small")
    seen = batch(model)
    with torch.no_grad():
        values = critic(to_rows(seen, "padded"))
        other = Image(np.full((28, 28, 3), 200, np.uint8))
        changed = critic(to_rows(attrs.evolve(seen, images=((other,),)), "padded"))
        assert values.shape == (len(seen.loss_mask),)
        assert (values - changed).abs().max() > 1e-4
        assert torch.isfinite(critic(empty_rows("padded"))).all()
