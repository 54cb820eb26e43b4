"""Train and sample for one Tinker client with rlsdk's learner and engines."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from tinker.proto import tinker_public_pb2 as messages
from transformers import AutoConfig

import rlsdk
from rlsdk.contracts import Completion, Sampling
from rlsdk_tinker.data import Data, RequestError, batch_of, output, prompt_of

_ONE = rlsdk.Totals(1, 1)
"""Denominators of a loss that is a sum over tokens."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STOPS = {"stop": messages.STOP_REASON_STOP, "length": messages.STOP_REASON_LENGTH}


@attrs.frozen
class SamplingSession:
    """A sampling session.

    Attributes:
        version: Version of the weights that it samples with; None for those that the engines have.
        path: Tinker path of its weights, if they have a name.
    """

    version: int | None
    path: str | None = None


class TinkerService:
    """The model of one client at a time: its gradients, updates, checkpoints and samples.

    The engines hold one version of the weights, the last that was saved for a sampler. A client that asks for another
    one is refused.

    Attributes:
        model_id: Id of the model in training; empty before the first.
        samplers: Sampling sessions by id.
    """

    def __init__(self, trainer: rlsdk.Trainer, folder: Path) -> None:
        """Serve an idle trainer.

        Args:
            trainer: Trainer whose configuration `command.settings` has completed.
            folder: Folder of checkpoints and exported models.
        """
        self._trainer, self._folder = trainer, folder
        self._config = trainer.plan.config
        model = self._config.model
        found = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        self._vocabulary = int(found.get_text_config().vocab_size)
        self.model_id = ""
        self.samplers: dict[str, SamplingSession] = {}
        self._version = 0  # of the learner's weights, counted in optimiser steps and loads
        self._published = 0
        self._accumulated = False  # a gradient waits for its optimiser step
        self._named: dict[str, int] = {}
        self._sampling = 0
        self._turn = asyncio.Condition()

    @property
    def model_name(self) -> str:
        """Name of the base model."""
        return str(self._config.model.path)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, which the client loads with transformers."""
        return str(self._config.model.tokenizer or self._config.model.path)

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a sequence."""
        return int(self._config.model.max_length)

    @property
    def lora_rank(self) -> int | None:
        """Rank of the adapter in training; None if all weights are trained."""
        lora = self._trainer.plan.learner.options.get("lora")
        return None if lora is None else int(lora["rank"])

    def check_model(self, model_id: str) -> None:
        """Refuse a model that another one has replaced.

        Raises:
            RequestError: It is not the model in training.
        """
        if model_id != self.model_id:
            raise RequestError(
                f"the server trains one model at a time, now {self.model_id or 'none'}; another training client has "
                f"replaced {model_id}"
            )

    async def create_model(self, model_id: str, base_model: str, lora: Mapping[str, Any] | None) -> dict[str, Any]:
        """Begin a training from the base model, which replaces the client's last one.

        Raises:
            RequestError: The server has another model, or an adapter of another rank.
        """
        self._check_base(base_model)
        if lora is not None and self.lora_rank not in (None, lora["rank"]):
            raise RequestError(
                f"the server trains an adapter of rank {self.lora_rank}, the client asked for {lora['rank']}; ask for "
                f"the server's, or start it with learner.lora.rank={lora['rank']}"
            )
        initial = self._folder / "initial"
        if not initial.exists():
            await self._save(initial)
        elif self._version:
            await self._load(initial)
        self.model_id = model_id
        return {"model_id": model_id, "type": "create_model"}

    async def forward_backward(self, request: Any) -> bytes:
        """Compute the loss and the logprobs of a `ForwardBackwardRequest` and, if asked to, add its gradient."""
        data = Data.of(request, longest=self.longest, vocabulary=self._vocabulary)
        if not len(data.batch):
            raise RequestError("the request has no data")
        logprobs = (await asyncio.to_thread(self._trainer.learner.forward, data.batch, ["logprobs"]))["logprobs"]
        found = data.token_loss(logprobs)
        if not request.forward_only and found.weights.any():
            batch = data.weighted(logprobs, found.weights)
            await asyncio.to_thread(self._trainer.learner.forward_backward, batch, _ONE, step=self._version, last=False)
            self._accumulated = True
        return output(data.batch, logprobs, {"loss:sum": float(found.values.sum())})

    async def optim_step(self, params: Mapping[str, float]) -> dict[str, Any]:
        """Take an optimiser step with the gradient of all `forward_backward` requests since the last one.

        Raises:
            RequestError: The learner was started with other settings of the optimiser.
        """
        self._check_optimizer(params)
        metrics = await self._step(float(params["learning_rate"]))
        kept = {"actor/grad_norm": "grad_norm:mean", "actor/lr": "lr:mean", "actor/skipped_updates": "skipped:sum"}
        return {"metrics": {name: metrics[key] for key, name in kept.items() if key in metrics}}

    async def save_for_sampler(self, name: str | None, session: str | None, kind: str) -> dict[str, Any]:
        """Send the weights to the engines and, under a name, export the model.

        Args:
            name: Name of the exported model; None for a sampling session.
            session: Id of the sampling session; None with a name.
            kind: `snapshot` for these weights, `inflight` for the newest ones.
        """
        await self._publish()
        if name is None:
            assert session is not None
            self.samplers[session] = SamplingSession(None if kind == "inflight" else self._published)
            return {"sampling_session_id": session, "type": "save_weights_for_sampler"}
        folder = self._folder / "sampler_weights" / _checked(name)
        await _written(folder, self._trainer.learner.export)
        path = f"tinker://{self._folder.parent.name}/sampler_weights/{name}"
        self._named[path] = self._published
        return {"path": path, "type": "save_weights_for_sampler"}

    def create_sampler(self, session: str, base_model: str | None, path: str | None) -> None:
        """Create a sampling session for named weights, or for the base model.

        Raises:
            RequestError: There are no such weights.
        """
        if path is not None and path not in self._named:
            raise RequestError(f"{path} was not saved for a sampler since the server started")
        if path is None:
            self._check_base(base_model or "")
        self.samplers[session] = SamplingSession(0 if path is None else self._named[path], path)

    async def save(self, name: str) -> dict[str, Any]:
        """Save weights and optimiser under a name."""
        await self._save(self._folder / "weights" / _checked(name))
        return {"path": f"tinker://{self._folder.parent.name}/weights/{name}", "type": "save_weights"}

    async def load(self, path: str, *, optimizer: bool, model_id: str) -> dict[str, Any]:
        """Load what `save` wrote.

        Raises:
            RequestError: There is no such checkpoint, or only its weights are wanted.
        """
        found = re.fullmatch(r"tinker://[^/]+/weights/([^/]+)", path)
        folder = self._folder / "weights" / _checked(found[1]) if found else None
        if folder is None or not folder.is_dir():
            saved = sorted(each.name for each in (self._folder / "weights").glob("*"))
            raise RequestError(f"there is no checkpoint {path}; saved are: {', '.join(saved) or 'none'}")
        if not optimizer:
            raise RequestError(
                "this server loads weights together with the optimiser: call load_state_with_optimizer or "
                "create_training_client_from_state_with_optimizer"
            )
        await self._load(folder)
        self.model_id = model_id
        return {"path": path, "model_id": model_id, "type": "load_weights"}

    async def sample(self, session: str, request: Mapping[str, Any]) -> bytes:
        """Sample continuations of a prompt, or compute the prompt's logprobs.

        Raises:
            RequestError: The session's weights are not those of the engines, or the server cannot do what is asked.
        """
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
            if request.get(name):
                raise RequestError(f"this server does not compute {name}")
        prompt, count = prompt_of(request["prompt"]["chunks"]), int(request.get("num_samples", 1))
        sampler = self.samplers[session]
        async with self._reading(sampler):
            scores = await self._prompt_logprobs(prompt) if request.get("prompt_logprobs") else None
            sampling = sampling_of(request["sampling_params"], self.longest - len(prompt))
            if sampling.max_tokens < 1:
                raise RequestError(f"the prompt has {len(prompt)} tokens; the server's model.max_length {self.longest}")
            seed = request["sampling_params"].get("seed")
            # A request for the prompt's logprobs also asks for one token.
            found = (await self._trainer.sample_async([prompt], sampling, count=count, seed=seed))[0]
        return _sampled(found, scores)

    @asynccontextmanager
    async def _reading(self, sampler: SamplingSession) -> AsyncIterator[None]:
        """Keep the engines' weights for the duration of a request."""
        async with self._turn:
            if sampler.version not in (None, self._published):
                raise RequestError(
                    f"this sampler has the weights of optimiser step {sampler.version}, the engines those of step "
                    f"{self._published}, which were saved for a sampler since; the server holds one version. Create a "
                    "sampler after each save, or one of kind 'inflight', which follows the newest weights"
                )
            self._sampling += 1
        try:
            yield
        finally:
            async with self._turn:
                self._sampling -= 1
                self._turn.notify_all()

    async def _publish(self) -> None:
        """Send the learner's weights to the engines once no request samples."""
        if self._version == self._published:
            return
        async with self._turn:
            await self._turn.wait_for(lambda: not self._sampling)
            await self._trainer.rollouts.publish(self._trainer.learner, self._version, updated=False)
            self._published = self._version

    async def _prompt_logprobs(self, prompt: np.ndarray) -> np.ndarray:
        """Compute the logprob of each token of a prompt but the first, float32 `[p - 1]`."""
        if self._version != self._published:
            raise RequestError(
                "the logprobs of a prompt are computed by the learner, whose weights are newer than this sampler's; "
                "ask before the next optimiser step"
            )
        if len(prompt) < 2:
            return np.zeros(0, np.float32)
        found = await asyncio.to_thread(self._trainer.learner.forward, batch_of([prompt]), ["logprobs"])
        return found["logprobs"]

    async def _step(self, learning_rate: float) -> dict[str, float]:
        learner = self._trainer.learner
        await asyncio.to_thread(learner.set_learning_rate, learning_rate)
        # Only now is it known that the last batch was the last, so an empty one says so.
        names = ("advantages", "old_logprobs", "behaviour_logprobs")
        nothing = batch_of([]).with_tokens(**dict.fromkeys(names, np.zeros(0, np.float32)))
        await asyncio.to_thread(learner.forward_backward, nothing, _ONE, step=self._version)
        metrics = await asyncio.to_thread(learner.optimizer_step)
        self._version, self._accumulated = self._version + 1, False
        return metrics

    async def _save(self, folder: Path) -> None:
        if self._accumulated:
            raise RequestError(
                "a gradient waits for its optimiser step, and no checkpoint holds it: call optim_step first"
            )
        await _written(folder, self._trainer.learner.save)

    async def _load(self, folder: Path) -> None:
        if self._accumulated:
            await self._step(0.0)  # the learner does not drop a gradient; the checkpoint replaces all that this changes
        await asyncio.to_thread(self._trainer.learner.load, folder)
        self._version += 1

    def _check_base(self, name: str) -> None:
        if name not in (self.model_name, Path(self.model_name).name):
            raise RequestError(f"this server has the model {self.model_name}, the client asked for {name}")

    def _check_optimizer(self, params: Mapping[str, float]) -> None:
        options = self._trainer.plan.learner.options
        betas = options["betas"]
        ours = {
            "beta1": ("learner.betas", betas[0]),
            "beta2": ("learner.betas", betas[1]),
            "eps": ("learner.eps", options["eps"]),
            "weight_decay": ("learner.weight_decay", options["weight_decay"]),
            "grad_clip_norm": ("learner.grad_clip", options["grad_clip"]),
        }
        for name, (key, value) in ours.items():
            if not np.isclose(params[name], value, rtol=1e-6, atol=0.0):
                raise RequestError(
                    f"the client asked for {name}={params[name]:g}, the server's optimiser has {value:g}, which stays "
                    f"for its lifetime; use the same, or start the server with {key}=…"
                )


def sampling_of(params: Mapping[str, Any], room: int) -> Sampling:
    """Return the sampling parameters of a request.

    Args:
        params: Tinker's `SamplingParams`.
        room: Number of tokens that fit behind the prompt.

    Raises:
        RequestError: A parameter has no counterpart.
    """
    stop = params.get("stop")
    if isinstance(stop, list) and not stop:
        raise RequestError("stop=[] ignores the end of text, which this server does not; leave `stop` out")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    most = params.get("max_tokens")
    return Sampling(
        temperature=params.get("temperature", 1.0),
        top_p=params.get("top_p", 1.0),
        top_k=max(params.get("top_k", -1), 0),
        max_tokens=room if most is None else min(most, room),
        stop=tuple(each for each in stops if isinstance(each, str)),
        stop_token_ids=tuple(each for each in stops if isinstance(each, int)),
    )


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise RequestError(f"{name!r} cannot name a checkpoint; use letters, digits, dots, hyphens and underscores")
    return name


async def _written(folder: Path, write: Any) -> None:
    """Write a folder aside and move it into place, so that it is whole or absent; an older one is replaced."""

    def work() -> None:
        aside = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        write(aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)

    await asyncio.to_thread(work)


def _sampled(completions: Sequence[Completion], scores: np.ndarray | None) -> bytes:
    found = messages.SampleResponse(
        sequences=[
            messages.SampledSequence(
                stop_reason=_STOPS[each.finish],
                tokens=each.token_ids.astype(np.int32).tobytes(),
                logprobs=each.logprobs.astype(np.float32).tobytes(),
            )
            for each in completions
        ]
    )
    if scores is not None:
        found.prompt_logprobs = np.append(np.float32(np.nan), scores).astype(np.float32).tobytes()
    return bytes(found.SerializeToString())
