"""Images: engine, learner and the transformers model agree."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from rlsdk.contracts import ActorSpec, Model, Request, Sampling, TrainBatch
from rlsdk.engines.client import Answer, GenerateRequest
from rlsdk.engines.transformers import Transformers
from rlsdk.errors import LearnerError, ValueFault
from rlsdk.learners.model import load_policy
from rlsdk.learners.model_faults import policy_faults
from rlsdk.learners.rows import to_rows
from rlsdk.rollout.chat import Prompt, RolloutContext, TokenChat
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.step_batch import pack
from rlsdk.types import Group, Image, Message, Rollout, Score, Task
from rlsdk.vision import Vision
from rlsdk.weights import to_weights
from tests import torchvision_parts
from tests.vision_models import KINDS, make, make_processor

WIDTH = 160
ENGINE: Callable[..., Any] = Transformers
"""What `Rig` samples with; `images_in_vllm.py` runs some of these tests with another."""
SIZES = {"small": (28, 28), "wide": (28, 56), "tall": (70, 40)}


def picture(seed: int, size: str = "small") -> Image:
    return Image(np.random.default_rng(seed).integers(0, 255, (*SIZES[size], 3), dtype=np.uint8))


@attrs.define
class Direct:
    """A client of one engine in this process."""

    engine: Any
    codec: ChatTokenizer
    asked: list[Request] = attrs.field(factory=list)
    serial: Any = attrs.field(factory=itertools.count)

    async def sample(self, request: GenerateRequest) -> Answer:
        own = Request(
            id=str(next(self.serial)),
            prompt_ids=request.prompt,
            sampling=request.sampling,
            seed=request.seed,
            images=request.images,
            image_positions=request.image_positions,
        )
        self.asked.append(own)
        self.engine.add([own])
        done = []
        while self.engine.unfinished:
            done += self.engine.step()
        return Answer(done[0], self.codec.decode([done[0].token_ids])[0])


@attrs.define
class Rig:
    model: Model
    engine: Any
    codec: ChatTokenizer

    @classmethod
    def of(cls, folder: Path, kind: str) -> Rig:
        from transformers import AutoTokenizer

        make(folder, kind)
        model = Model(path=str(folder), max_length=WIDTH)
        engine = ENGINE(max_num_seqs=8)
        engine.start(model, ActorSpec(role="engine"))
        codec = ChatTokenizer(AutoTokenizer.from_pretrained(folder), vision=Vision(model))
        return cls(model, engine, codec)

    def chat(self, *content: Any, seed: int = 3) -> TokenChat:
        task = Task("t", (Message("user", content),))
        sampling = Sampling(max_tokens=12, ignore_eos=True)
        context = RolloutContext(
            codec=self.codec, client=Direct(self.engine, self.codec), sampling=sampling, max_length=WIDTH
        )
        return TokenChat(Prompt(task, *self.codec.prompt(task)), context, "g", seed)

    def talk(self, seed: int = 3) -> Rollout:
        """Three turns, with images in the first two messages: of one size each, then two at once."""

        async def run() -> Rollout:
            chat = self.chat("1 + ", picture(1, "wide"), "=", seed=seed)
            await chat.sample()
            chat.say((picture(2), "2", picture(3, "tall")))
            await chat.sample()
            chat.say("3")
            await chat.sample()
            chat.say(("never sent", picture(4)))
            return chat.finish()

        return asyncio.run(run())


def batch_of(*rollouts: Rollout) -> TrainBatch:
    packed = pack([Group(r.task, (r,), (Score(1.0),)) for r in rollouts])
    assert packed is not None
    return packed.arrays


def expected(folder: Path, kind: str, rollout: Rollout, temperature: float = 1.0) -> np.ndarray:
    """Logprobs of all tokens but the first, by the processor and the model of transformers alone.

    None of the sampled tokens may have the id of the image token.
    """
    from transformers import AutoModelForImageTextToText

    net = AutoModelForImageTextToText.from_pretrained(folder).eval()
    images = [image.open() for image in rollout.images[:3]]
    given = dict(make_processor(kind)(images, return_tensors="pt"))
    given.pop("num_crops", None)
    ids = torch.from_numpy(np.array(rollout.token_ids))[None]
    types = (ids == Vision(Model(path=str(folder))).token).int()
    given["token_type_ids" if kind == "gemma3" else "mm_token_type_ids"] = types
    with torch.no_grad():
        logits = net(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0, :-1].float()
    found = (logits / temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return np.asarray(found.numpy())


def without_image_tokens(rig: Rig) -> Rollout:
    """A conversation in which the policy samples no image token of its own."""
    token = rig.codec.vision.token if rig.codec.vision else -1
    for seed in range(50):
        rollout = rig.talk(seed)
        if token not in rollout.token_ids[rollout.loss_mask]:
            return rollout
    raise AssertionError("every conversation holds one")


@pytest.mark.parametrize("kind", KINDS)
def test_engine_learner_and_transformers_agree_in_a_conversation_with_images(tmp_path: Path, kind: str) -> None:
    rig = Rig.of(tmp_path, kind)
    rollout = without_image_tokens(rig)
    by_transformers = expected(tmp_path, kind, rollout)
    policy = load_policy(rig.model, "sdpa", False)
    batch = batch_of(rollout)
    learned = policy(to_rows(batch, "padded"))[0].detach().numpy()
    start = int(batch.starts[0])
    np.testing.assert_allclose(learned, by_transformers[start - 1 : start - 1 + len(learned)], atol=1e-5)
    sampled = rollout.loss_mask
    np.testing.assert_allclose(rollout.logprobs[sampled], learned[batch.loss_mask], atol=1e-5)
    assert len(rollout.images) == 4
    assert len(rollout.image_positions) == sum(map(Vision(rig.model).count, rollout.images[:3]))
    # The images matter: another one, other logprobs.
    _, *more = rollout.images
    other = attrs.evolve(batch, images=((picture(9, "wide"), *more),))
    assert np.abs(policy(to_rows(other, "padded"))[0].detach().numpy() - learned).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_token_that_the_policy_samples_is_text(tmp_path: Path, kind: str) -> None:
    rig = Rig.of(tmp_path, kind)
    token = Vision(rig.model).token
    rollout = rig.talk()
    ids = np.array(rollout.token_ids)
    turn = np.flatnonzero(rollout.loss_mask)[:12]
    ids[turn[3:6]] = token  # within the first answer
    changed = attrs.evolve(rollout, token_ids=ids)
    policy = load_policy(rig.model, "sdpa", False)
    batch = batch_of(changed)
    learned = policy(to_rows(batch, "padded"))[0].detach().numpy()
    assert np.isfinite(learned).all()
    # The engine reads the same history: a prompt that ends before the last answer, whose first token it samples.
    last = int(np.flatnonzero(~rollout.loss_mask)[-1]) + 1
    request = Request(
        id="r",
        prompt_ids=ids[:last],
        sampling=Sampling(temperature=0.0, max_tokens=4, ignore_eos=True),
        images=changed.images[:3],
        image_positions=changed.image_positions,
    )
    rig.engine.add([request])
    done = []
    while rig.engine.unfinished:
        done += rig.engine.step()
    whole = np.concatenate([ids[:last], done[0].token_ids])
    mask = np.append(np.array(rollout.loss_mask)[:last], np.ones(4, bool))
    zeros = np.zeros(len(whole))
    again = attrs.evolve(
        changed, token_ids=whole, loss_mask=mask, logprobs=zeros, policy_versions=zeros, rewards=(), metrics={}
    )
    policy_logprobs = policy(to_rows(batch_of(again), "padded"))[0].detach().numpy()
    np.testing.assert_allclose(done[0].logprobs, policy_logprobs[-4:], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_with_images_and_without_share_a_batch_and_go_on_with_new_weights(tmp_path: Path, kind: str) -> None:
    """Prompts of different lengths are padded; with new weights the cache is recomputed, including images."""
    rig = Rig.of(tmp_path, kind)
    codec, sampling = rig.codec, Sampling(max_tokens=10, ignore_eos=True)
    token = Vision(rig.model).token
    talks = [("1", picture(1, "tall")), ("2 + 3 + 4",), (picture(2), picture(3), "5")]
    requests = []
    for i, content in enumerate(talks):
        message = Message("user", content)
        ids = codec.prompt_tokens([message], plain=False)
        positions = np.flatnonzero(ids == token)
        requests.append(
            Request(id=str(i), prompt_ids=ids, sampling=sampling, n=2, images=message.images, image_positions=positions)
        )
    rig.engine.add(requests)
    done = []
    for _ in range(5):
        done += rig.engine.step()
    policy = load_policy(rig.model, "sdpa", False)
    old = {key: value.clone() for key, value in policy.state_dict().items()}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    from rlsdk.conversion import aliases, to_checkpoint

    state = {k: v for k, v in policy.model.state_dict().items() if k not in aliases(policy.model)}
    rig.engine.load_weights(to_weights(1, to_checkpoint(policy.model, state)))
    while rig.engine.unfinished:
        done += rig.engine.step()
    assert len(done) == 6
    new = {key: value.clone() for key, value in policy.state_dict().items()}
    for completion in done:
        request = requests[int(completion.request)]
        ids = np.concatenate([request.prompt_ids, completion.token_ids])
        mask = np.arange(len(ids)) >= len(request.prompt_ids)
        assert set(completion.versions.tolist()) == {0, 1}
        task = Task("t", (Message("user", talks[int(completion.request)]),))
        rollout = Rollout(task, task.prompt, ids, mask, mask * 0.0, mask - 1, image_positions=request.image_positions)
        rows = to_rows(batch_of(rollout), "padded")
        for version, weights in enumerate((old, new)):
            policy.load_state_dict(weights)
            learned = policy(rows)[0].detach().numpy()
            chosen = completion.versions == version
            np.testing.assert_allclose(completion.logprobs[chosen], learned[chosen], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_are_those_of_single_rollouts(tmp_path: Path, kind: str) -> None:
    rig = Rig.of(tmp_path, kind)
    with_images = rig.talk()
    task = Task("u", (Message("user", "1 + 2"),))
    ids = np.concatenate([rig.codec.prompt(task)[1], [10, 11, 12]])
    mask = np.arange(len(ids)) >= len(ids) - 3
    plain = Rollout(task, task.prompt, ids, mask, mask * 0.0, mask - 1)
    policy = load_policy(rig.model, "sdpa", False)

    def learned(*rollouts: Rollout) -> np.ndarray:
        return np.asarray(policy(to_rows(batch_of(*rollouts), "padded"))[0].detach().numpy())

    alone = [learned(plain), learned(with_images)]
    together = learned(plain, with_images)
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-5)
    batch = batch_of(plain, with_images)
    assert batch.select(np.array([1])).images == (with_images.images,)
    assert TrainBatch.concatenate([batch.select(np.array([1])), batch_of(plain)]).images == (with_images.images, ())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_the_vision_tower_only_from_images_and_every_parameter_gets_one(
    tmp_path: Path, kind: str
) -> None:
    """Without images the tower's gradient is zero, not missing: ranks with ZeRO take the same steps."""
    rig = Rig.of(tmp_path, kind)
    policy = load_policy(rig.model, "sdpa", False)
    tower = {n: p for n, p in policy.model.named_parameters() if ".visual." in n or "vision_tower" in n}
    assert tower
    task = Task("u", (Message("user", "1 + 2"),))
    ids = np.concatenate([rig.codec.prompt(task)[1], [10, 11, 12]])
    mask = np.arange(len(ids)) >= len(ids) - 3
    plain = Rollout(task, task.prompt, ids, mask, mask * 0.0, mask - 1)
    policy(to_rows(batch_of(plain), "padded"))[0].sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in tower.values())
    policy(to_rows(batch_of(rig.talk()), "padded"))[0].sum().backward()
    assert sum(bool(p.grad.any()) for p in tower.values()) > len(tower) / 2


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    rig = Rig.of(tmp_path, "qwen2_5_vl")
    rollout = rig.talk()
    with pytest.raises(LearnerError, match=r"need one row each; set learner\.rows=padded"):
        to_rows(batch_of(rollout), "packed")
    request = Request(id="r", prompt_ids=np.arange(3, 9), sampling=Sampling(), images=(picture(1),))
    with pytest.raises(ValueFault, match="0 of its tokens represent images, but its images need 4"):
        rig.engine.add([request])
    policy = load_policy(rig.model, "sdpa", False)
    assert policy_faults(policy.model, "sdpa", "padded") == []
    assert "reads images, and learner.rows=packed would mix" in policy_faults(policy.model, "sdpa", "packed")[0]
    assert "flash attention has no mask" in policy_faults(policy.model, "flash_attention_2", "padded")[0]


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.parametrize("kind", [each for each in KINDS if each != "gemma3"])
def test_vllm_reads_images_as_the_learner_does_with_new_weights_in_between(tmp_path: Path, kind: str) -> None:
    if problem := torchvision_parts.install(tmp_path / "torchvision"):
        pytest.skip(problem)
    path = os.pathsep.join((str(tmp_path / "torchvision"), *filter(None, sys.path)))
    program = Path(__file__).with_name("images_in_vllm.py")
    command = [sys.executable, str(program), str(tmp_path), kind]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert ran.returncode == 0, ran.stderr[-4000:]
