"""The learner on a GPU: the head, the rows, and, where DeepSpeed is installed, whole updates. Never run so far."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from rlsdk.batch import LossInputs
from rlsdk.contracts import ActorSpec, LossSpec, Model, Roles, TrainBatch
from rlsdk.head import token_logprobs
from rlsdk.marks import policy_loss

pytestmark = pytest.mark.gpu


@policy_loss("simple")
def simple(x: LossInputs) -> torch.Tensor:
    return -x.advantages * x.logprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def make_batch(count: int = 16) -> TrainBatch:
    rng = np.random.default_rng(0)
    starts, responses = rng.integers(1, 20, count), rng.integers(1, 40, count)
    t = int(responses.sum())
    noise = rng.normal(size=(2, t)).astype(np.float32)
    return TrainBatch(
        token_ids=rng.integers(0, 512, int((starts + responses).sum())),
        lengths=starts + responses,
        starts=starts,
        responses=responses,
        loss_mask=np.ones(t, bool),
        tokens={"old_logprobs": noise[0] - 6, "advantages": noise[1]},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_on_a_large_vocabulary(dtype: torch.dtype) -> None:
    t, d, v = 1024, 256, 50_000
    torch.manual_seed(0)
    hidden = torch.randn(t, d, device="cuda").to(dtype).requires_grad_()
    weight = (0.05 * torch.randn(v, d, device="cuda")).to(dtype).requires_grad_()
    targets = torch.randint(v, (t,), device="cuda")
    logprobs, entropy, _ = token_logprobs(hidden, weight, targets, entropy="gradient", temperature=0.8)
    assert entropy is not None
    mine = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    log_p = (wide[0] @ wide[1].t() / 0.8).log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0]
    theirs = torch.autograd.grad(expected.sum() - (log_p.exp() * log_p).sum(), wide)
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    assert float((logprobs.double() - expected).abs().max()) < tolerance
    for a, b in zip(mine, theirs, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < tolerance


def test_the_head_takes_the_memory_of_a_chunk() -> None:
    t, d, v = 8192, 64, 100_000
    hidden = torch.randn(t, d, device="cuda", requires_grad=True)
    weight = torch.randn(v, d, device="cuda", requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token_logprobs(hidden, weight, torch.zeros(t, dtype=torch.int64, device="cuda"))[0].sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 4 * t * v / 8


def test_rows_padded_and_packed_agree(folder: Path) -> None:
    from rlsdk.learners.model import load_policy
    from rlsdk.learners.rows import to_rows

    policy = load_policy(Model(path=str(folder)), "sdpa", False).cuda()
    with torch.no_grad():
        padded, packed = (policy(to_rows(make_batch(), style).to("cuda"))[0] for style in ("padded", "packed"))
    torch.testing.assert_close(padded, packed, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_updates_on_deepspeed(dtype: str, stage: int, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    from rlsdk.learners.deepspeed import DeepSpeedLearner
    from rlsdk.plugins import Plugins

    place = ActorSpec(role="learner", device="cuda", cache=str(tmp_path))
    learner = DeepSpeedLearner(lr=1e-3, zero_stage=stage, micro_batch_tokens=256)  # type: ignore[arg-type]
    os.environ.update(learner.environment(place))
    model = Model(path=str(folder), dtype=dtype)  # type: ignore[arg-type]
    learner.start(Roles(actor=model), LossSpec(policy_loss=Plugins().reference("policy_loss", simple)), place, 10)
    batch = make_batch()
    before = learner.logprobs(batch)["logprobs"]
    metrics = learner.update([(batch, len(batch.loss_mask), len(batch))], 0)
    assert np.isfinite(metrics["actor/grad_norm"])
    learner.save(tmp_path / "checkpoint")
    after = learner.logprobs(batch)["logprobs"]
    assert np.abs(after - before).max() > 0
    learner.load(tmp_path / "checkpoint")
    np.testing.assert_array_equal(learner.logprobs(batch)["logprobs"], after)
    weights = learner.weights(1)
    assert weights is not None
    assert weights.dtypes["lm_head.weight"] == dtype
