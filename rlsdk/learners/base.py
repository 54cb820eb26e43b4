"""Base of learners that train transformers models and differ only in how they shard them across ranks."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs
import numpy as np

from rlsdk.contracts import ActorSpec, Adapter, LossSpec, Model, Roles, TrainBatch, TrainedRole, Weights
from rlsdk.errors import CheckpointError, LearnerError
from rlsdk.learners.checkpoint import load_models, save_models
from rlsdk.learners.export import WeightExporter
from rlsdk.learners.flops import ModelFlops, peak_tflops
from rlsdk.learners.lora import switched_off, wrap
from rlsdk.learners.micro_batches import MicroBatchRunner, SharedRows, with_less
from rlsdk.learners.options import NO_FLOAT16, LearnerOptions
from rlsdk.learners.ranks import Ranks, environment
from rlsdk.learners.reference import FOLDER, MovingReference
from rlsdk.learners.trained import LearningRate, OffloadedTensors, PhaseTimer, TrainedModule
from rlsdk.preflight import size_text

if TYPE_CHECKING:
    from torch import Tensor

    from rlsdk.batch import Totals

log = logging.getLogger(__name__)


@attrs.define(kw_only=True, eq=False, slots=False)
class TransformersLearner(LearnerOptions):
    """A learner for transformers models; subclasses decide how to shard them across ranks.

    It packs rollouts into micro-batches, computes the objective over all ranks, writes checkpoints with hashes, merges
    adapters and sends weights to engines. A subclass implements `train`, `freeze`, `facts` and `rank_memory`, and may
    override other methods. Its options are those of `LearnerOptions`.
    """

    reshards: ClassVar[bool] = False
    """True if a different number of ranks may load a checkpoint, because `TrainedModule.read` reshards it."""

    _place: ActorSpec = attrs.field(init=False)
    _ranks: Ranks = attrs.field(init=False)
    _temperature: float = attrs.field(init=False)
    _actor: TrainedModule | None = attrs.field(init=False, default=None)
    _critic: TrainedModule | None = attrs.field(init=False, default=None)
    _reference: Any = attrs.field(init=False, default=None)
    _moving: MovingReference | None = attrs.field(init=False, default=None)
    _roles: Roles = attrs.field(init=False)
    _passes: MicroBatchRunner = attrs.field(init=False)
    _updates: Any = attrs.field(init=False)
    _flops: dict[TrainedRole, ModelFlops] = attrs.field(init=False, factory=dict)
    _exporter: WeightExporter = attrs.field(init=False)
    _clock: PhaseTimer = attrs.field(init=False, factory=PhaseTimer)
    _offloaded: OffloadedTensors | None = attrs.field(init=False, default=None)

    @abstractmethod
    def train(self, module: Any, model: Model, rate: LearningRate, role: TrainedRole) -> TrainedModule:
        """Shard a module across ranks and prepare it for training; a collective.

        Args:
            module: A policy or critic loaded under `loading`: by default unsharded, on the CPU. Its `model` is the
                transformers model.
            model: Source and dtype of the module.
            rate: Learning rate and its schedule.
            role: Role to train it as.
        """

    @abstractmethod
    def freeze(self, module: Any, model: Model) -> Any:
        """Prepare a module that is not trained, and return a callable that runs it; a collective."""

    def frozen_tensors(self, module: Any) -> Iterable[Tensor]:
        """Return tensors of a module from `freeze` that leave a shared GPU while engines generate; by default, none."""
        return ()

    def moving_reference(self, module: Any, mix: float) -> MovingReference:
        """Make a module from `freeze` a reference model that follows the policy; see `MovesReference`.

        A learner that can do so overrides it, implements `TrainedModule.masters` and has a method `reference_faults`.
        """
        raise LearnerError(f"{type(self).__name__} cannot move its reference model; set reference.update_every=0")

    @property
    @abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """Options that must be equal when a checkpoint is loaded, as plain JSON."""

    def loading(self, model: Model) -> AbstractContextManager[None]:
        """Return a context for loading models; override it if no rank may hold a whole model."""
        return nullcontext()

    def prepare(self, module: Any) -> None:
        """Change a loaded module before adapters are added and it is sharded."""

    def share_rows(self, ranks: Ranks) -> SharedRows | None:
        """Return the runner of models on rows, such as ranks that share rollouts; None to run models directly."""
        if not self.packs_without_mask:
            return None
        from rlsdk.learners.packing import PackedAttention

        return PackedAttention()

    def connect(self, device: str) -> None:
        """Prepare the sharding backend, once this rank has joined the others."""

    @property
    def adapts_entropy(self) -> bool:
        """True: its objective measures the entropy; see `AdaptsEntropy`."""
        return True

    @property
    def place(self) -> ActorSpec:
        """Placement of this rank, set by `start`."""
        return self._place

    def environment(self, place: ActorSpec) -> Mapping[str, str]:
        """Return the environment variables to set before the actor's process imports anything."""
        return environment(place, compiled=False)

    def preload(self) -> None:
        """Import the modules that a rank needs."""
        from rlsdk.learners import actor, model, objective, updates  # noqa: F401

    def start(self, roles: Roles, loss: LossSpec, place: ActorSpec, total_updates: int) -> None:
        """Load the models; `total_updates` is the length of the learning-rate schedule in optimiser steps.

        Raises:
            LearnerError: A model cannot be used.
        """
        from rlsdk.learners.objective import Objective
        from rlsdk.learners.updates import Updates

        host, _, port = place.master.rpartition(":")
        os.environ.update({**self.environment(place), "MASTER_ADDR": host or "127.0.0.1", "MASTER_PORT": port or "0"})
        self._place, self._roles = place, roles
        if place.device == "cuda":
            import torch

            self._clock.event = partial(torch.cuda.Event, enable_timing=True)
            # Torch prefers cuDNN's attention on an H100, which is compiled again for every length of a rollout.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._ranks = Ranks.join(place.rank, place.world_size, place.device, place.master)
        tokens = self._tokens(roles, place)  # before anything is loaded
        self.connect(place.device)
        objective = Objective(loss)
        self._temperature = loss.temperature
        self._passes = self._runner(roles.main, tokens)
        if roles.actor is not None:
            before = total_updates * loss.critic_warmup // loss.train_steps
            self._load_actor(roles.actor, self.rate_factor(total_updates - before))
        if roles.critic is not None:
            self._load_critic(roles.critic, self.rate_factor(total_updates))
        self._updates = Updates(
            objective=objective,
            passes=self._passes,
            trained=self._trained,
            seed=place.seed,
            device=place.device,
            flops=self._flops,
        )
        if roles.reference is not None and not self._base_is_reference:
            self._load_reference(roles.reference)

    def _runner(self, model: Model, tokens: int) -> MicroBatchRunner:
        from rlsdk.learners.model import read_config
        from rlsdk.learners.model_faults import check_layers

        config = read_config(model)
        if self.rows in ("shared", "tree"):
            check_layers(config, self.rows)
        return MicroBatchRunner(
            self._ranks,
            self._clock,
            self.rows,
            tokens,
            config.get_text_config().hidden_size,
            self.share_rows(self._ranks),
            exact_width=model.max_length if model.exact else None,
        )

    def _load_actor(self, model: Model, factor: Callable[[int], float]) -> None:
        from rlsdk.learners.model import load_policy
        from rlsdk.learners.router import shared_rows_fault

        with self.loading(model):
            actor = load_policy(model, self.attention, self.gradient_checkpointing, router_loss=self.router_loss_coef)
        if self.readers > 1 and (fault := shared_rows_fault(actor.model, self.router_loss_coef)):
            raise LearnerError(f"model {model.path}: {fault}")
        self._flops["actor"] = ModelFlops.of(actor.model, adapted=self.lora is not None)
        self._prepare(actor, model)
        if self.lora is not None:
            wrap(actor.model, self.lora, self._place.seed)
        self._actor = self._train(actor, model, LearningRate(peak=self.lr, factor=factor), "actor")
        self._exporter = WeightExporter(
            self._actor.module.model, model, self._ranks, self.lora, self._actor.full_tensors, actor.dropouts
        )

    def _load_critic(self, model: Model, factor: Callable[[int], float]) -> None:
        from rlsdk.learners.model import load_critic

        with self.loading(model):
            critic = load_critic(model, self.attention, self.gradient_checkpointing, self.value_init)
        self._flops["critic"] = ModelFlops.of(critic.model)
        self._prepare(critic, model)
        lr = self.lr * 10 if self.critic_lr is None else self.critic_lr
        self._critic = self._train(critic, model, LearningRate(peak=lr, factor=factor), "critic")

    def _load_reference(self, model: Model) -> None:
        from rlsdk.learners.model import load_policy

        with self.loading(model):
            reference = load_policy(model, self.attention, False, router_loss=0.0)
        self._prepare(reference, model)
        self._reference = self.freeze(reference.requires_grad_(False).eval(), model)
        if self._roles.reference_mix is not None:
            self._moving = self.moving_reference(self._reference, self._roles.reference_mix)

    def _tokens(self, roles: Roles, place: ActorSpec) -> int:
        """Return the token budget of a micro-batch, equal on all ranks; `auto` derives it from the free memory."""
        if self.micro_batch_tokens != "auto":
            return self.micro_batch_tokens
        from rlsdk.learners.estimate import auto_tokens, free_memory

        free = free_memory(place)
        tokens = -self._ranks.all_reduce_max([-auto_tokens(self, roles, place, free)])[0]
        log.warning("micro_batch_tokens: auto is %d, with %s free", tokens, size_text(free))
        return tokens

    def _prepare(self, module: Any, model: Model) -> None:
        from rlsdk.learners.packing import copy_grouped_heads

        if self._place.device == "cuda":
            copy_grouped_heads(module.model)
        self._passes.adopt(module, model)
        self.prepare(module)

    def _train(self, module: Any, model: Model, rate: LearningRate, role: TrainedRole) -> TrainedModule:
        if model.dtype == "float16":
            raise LearnerError(NO_FLOAT16)
        return self.train(module, model, rate, role)

    @property
    def _base_is_reference(self) -> bool:
        """True if the actor without its adapter serves as the reference, which saves a second model."""
        actor = self._roles.actor
        return self.lora is not None and actor is not None and self._roles.reference == actor

    def logprobs(
        self, batch: TrainBatch, role: Literal["actor", "reference"] = "actor", fields: Sequence[str] = ("logprobs",)
    ) -> dict[str, np.ndarray]:
        """Return the requested `logprobs`, `entropy` and `probs_squared_sum`, float32 `[t]` each, without a graph.

        Raises:
            LearnerError: The learner does not hold that role.
        """
        if role == "reference":
            self._wake()
            # The reference routes by itself.
            batch = attrs.evolve(batch, context={k: v for k, v in batch.context.items() if k != "routed_experts"})
        off = role == "reference" and self._base_is_reference
        model: Any = self._actor if role == "actor" or off else self._reference
        if model is None:
            raise LearnerError(f"this learner holds no {role}")
        entropy, squares = "value" if "entropy" in fields else "none", "probs_squared_sum" in fields
        names = ("logprobs", "entropy", "probs_squared_sum")

        def run(rows: Any) -> dict[str, Tensor]:
            results = self._passes.run(model, rows, self._temperature, entropy, squares)
            return {name: result for name, result in zip(names, results, strict=True) if name in fields}

        with switched_off(self.actor.module) if off else nullcontext():
            return self._forward(f"the forward pass of the {role}", run, batch, fields)

    def _forward(self, what: str, run: Any, batch: TrainBatch, fields: Sequence[str]) -> dict[str, np.ndarray]:
        passes = partial(self._passes.forward, run, batch, fields)
        return with_less(self._passes, what, passes, again=passes, why_not=self._repeat_fault)

    @property
    def _repeat_fault(self) -> str:
        """Return why a pass that ran out of memory cannot restart; empty if it can."""
        for trained in self._trained.values():
            return trained.repeat_fault
        return "other ranks wait for this one, so it cannot restart" if self._ranks.world > 1 else ""

    @property
    def actor(self) -> TrainedModule:
        """The policy.

        Raises:
            LearnerError: This learner holds no actor.
        """
        if self._actor is None:
            raise LearnerError("this learner holds no actor")
        return self._actor

    def values(self, batch: TrainBatch) -> np.ndarray:
        """Return the critic's values of the states in which response tokens were chosen, float32 `[t]`.

        Raises:
            LearnerError: The learner has no critic.
        """
        critic = self._critic
        if critic is None:
            raise LearnerError("this learner holds no critic")
        run = self._passes.run
        fields = self._forward(
            "the critic's forward pass", lambda rows: {"values": run(critic, rows)}, batch, ("values",)
        )
        return fields["values"]

    def update(self, minibatches: Sequence[tuple[TrainBatch, int, int]], step: int) -> dict[str, float]:
        """Take one optimiser step per minibatch (this rank's share, trained tokens and trained rollouts of all ranks).

        Returns:
            Metrics, equal on every rank and exact over micro-batches and ranks: means over trained tokens or, for
            losses, norms and learning rates, over optimiser steps. Skipped updates are counted and add no other metric.

        Raises:
            LearnerError: More than `skip_limit` gradients in a row were not finite.
        """
        self._wake()
        metrics: dict[str, float] = self._updates.update(minibatches, step)
        return metrics

    def forward_backward(
        self,
        batch: TrainBatch,
        totals: Totals,
        *,
        role: TrainedRole = "actor",
        step: int = 0,
        update: int = 0,
        updates: int = 1,
        last: bool = True,
    ) -> None:
        """Accumulate the gradient of this rank's rollouts for the optimiser step; see `GivesPrimitives`.

        A loss that reads `x.whole` gets the rollouts of this call, over all ranks.

        Raises:
            LearnerError: The learner does not train that role.
        """
        self._wake()
        self._updates.forward_backward(batch, totals, role=role, step=step, update=update, updates=updates, last=last)

    def optimizer_step(self, role: TrainedRole = "actor") -> dict[str, float]:
        """Take one optimiser step along the gradient, and return its metrics as in `update`.

        Raises:
            LearnerError: More than `skip_limit` gradients in a row were not finite.
        """
        self._wake()
        metrics: dict[str, float] = self._updates.means(self._updates.optimizer_step(role), [role])
        return metrics

    def set_learning_rate(self, lr: float, role: TrainedRole = "actor") -> None:
        """Set the peak learning rate from the next optimiser step on; the schedule scales it and `save` stores it.

        On resume, a learning rate set this way overrides `lr` and `critic_lr`.
        """
        self._trained[role].peak_lr = lr

    def move_reference(self) -> None:
        """Move the reference model towards the policy, by the share `reference_mix` of the roles; a collective.

        Raises:
            LearnerError: The reference model does not move.
        """
        if self._moving is None:
            raise LearnerError("move_reference: this learner was started without a share of the policy (reference_mix)")
        self._wake()
        self._moving.move(self.actor.masters())

    def sleep(self) -> None:
        """Move the reference, and tensors that only optimiser steps use, to host memory; see `FreesDevice`."""
        if self._offloaded is None:
            tensors = [tensor for trained in self._trained.values() for tensor in trained.update_tensors()]
            tensors += [] if self._reference is None else self.frozen_tensors(self._reference)
            tensors += [] if self._moving is None else self._moving.copies()
            device = self._place.device
            moved = (each for each in tensors if each.device.type == device)
            self._offloaded = OffloadedTensors(moved, pinned=device == "cuda")
            log.debug("%s are in host memory until the next update", size_text(self._offloaded.nbytes))
        if self._place.device == "cuda":
            import torch

            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # buckets that engines have read
            torch.cuda.empty_cache()  # otherwise torch keeps the freed memory for this process

    def _wake(self) -> None:
        """Take back what `sleep` freed."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def weights(self, version: int) -> Weights | None:
        """Return the actor's tensors as `save_pretrained` writes them, adapter merged (rank 0; None elsewhere)."""
        return self._exporter.weights(version)

    def weight_parts(self, version: int) -> Iterator[Weights | None]:
        """Yield the tensors of `weights` layer by layer, without a copy where no gather is needed."""
        return self._exporter.parts(version, copy=False)

    def weight_tensors(self, version: int) -> Iterator[Weights | None]:
        """Yield what `weight_parts` yields, as torch tensors on the learner's device."""
        return self._exporter.parts(version, host=False)

    def rank_weight_tensors(self, version: int) -> Iterator[Weights | None]:
        """Yield what `weight_tensors` yields on rank 0, on every rank."""
        return self._exporter.parts(version, host=False, each_rank=True)

    @property
    def adapter(self) -> Adapter | None:
        """Shape of the adapter sent to engines; None if whole models are sent."""
        return self.lora.adapter if self.lora and self.lora.sync == "adapter" else None

    def adapter_weights(self, version: int) -> Weights | None:
        """Return the adapter's tensors by the names in peft's files (rank 0; None elsewhere)."""
        return self._exporter.adapter_weights(version)

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the logprob of each token given those before it, at temperature 1, float32 `[k - 1]`."""
        return self._passes.canary(self.actor, token_ids)

    def clock(self) -> dict[str, float]:
        """Return seconds so far: `forward_seconds`, and `update_seconds` of backward passes and optimiser steps.

        Also `update_flop`, the FLOPs that the models needed in updates, and `peak_tflops` of a known GPU in bfloat16.
        """
        counters = {**self._clock.seconds, "update_flop": self._updates.update_flop}
        if self._place.device == "cuda" and self._roles.main.dtype == "bfloat16":
            import torch

            if peak := peak_tflops(torch.cuda.get_device_name()):
                counters["peak_tflops"] = peak
        return counters

    def save(self, folder: Path) -> None:
        """Write a checkpoint, each rank its part, with a manifest of hashes; all ranks must see `folder`."""
        # A frozen base is already in the model's folder.
        memory, frozen = self._updates.objective.state(), self.lora is None
        if self._moving is not None:
            self._moving.save(folder / FOLDER, self._ranks.rank)
        save_models(folder, self._trained, self._ranks, self._facts, memory=memory, frozen=frozen)

    def load(self, folder: Path) -> None:
        """Restore from a folder that `save` wrote. Files are only opened if all hashes match; nothing is executed.

        Raises:
            CheckpointError: A file is missing or changed, or the learner's setup differs.
        """
        self._wake()
        memory = load_models(
            folder,
            self._trained,
            self._ranks,
            self._facts,
            frozen=self.lora is None,
            same_ranks=not self.reshards,
        )
        moved = folder / FOLDER  # absent before the first move of a reference model
        if self._moving is not None and moved.is_dir():
            self._moving.load(moved, self._ranks.rank)
        elif self._reference is not None and moved.is_dir():
            raise CheckpointError(
                f"{moved} holds a reference model that followed the policy, and this run's does not move: it would be "
                "the initial one again; set reference.update_every as before"
            )
        self._updates.objective.restore(memory)

    @property
    def _trained(self) -> dict[TrainedRole, TrainedModule]:
        modules: dict[TrainedRole, TrainedModule | None] = {"actor": self._actor, "critic": self._critic}
        return {role: trained for role, trained in modules.items() if trained is not None}

    @property
    def _facts(self) -> dict[str, Any]:
        return {**self.option_facts, "dtype": self._roles.main.dtype, "roles": sorted(self._trained)}

    @property
    def option_facts(self) -> dict[str, Any]:
        """Facts that the options alone determine, so that a resume can compare them before the learner starts."""
        return {**self.facts, "lora": self.lora and self.lora.facts, "optimizer": self.optimizer_name}

    def export(self, folder: Path) -> None:
        """Write a folder for `transformers.from_pretrained`: safetensors weights, config, tokenizer; rank 0 writes.

        Adapters are merged into the weights, and also written to `adapter` in peft's format.
        """
        self._exporter.export(folder)

    def stop(self) -> None:
        """Free everything."""
        import torch.distributed as dist

        for trained in self._trained.values():
            trained.close()
        if dist.is_initialized():
            dist.destroy_process_group()
