"""The learner on DeepSpeed: ZeRO 0 to 3, with roles actor, critic and reference in one process per rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np

from rlsdk.contracts import ActorSpec, Adapter, LossSpec, Model, Roles, TrainBatch, TrainedRole, Weights
from rlsdk.errors import LearnerError
from rlsdk.isolation.process import hidden
from rlsdk.learners.deepspeed_options import DeepSpeedOptions
from rlsdk.learners.export import WeightExporter
from rlsdk.learners.lora import switched_off, wrap
from rlsdk.learners.passes import MicroBatchRunner
from rlsdk.learners.ranks import Ranks
from rlsdk.learners.saving import load_models, save_models
from rlsdk.learners.shortage import with_less
from rlsdk.learners.zero import DeepSpeedConfig, PhaseTimer, Trained, schedule
from rlsdk.marks import learner
from rlsdk.preflight import size_text

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlsdk.batch import Totals

log = logging.getLogger(__name__)


@learner("deepspeed")
@attrs.define(kw_only=True, eq=False)
class DeepSpeedLearner(DeepSpeedOptions):
    """Trains on DeepSpeed, on CPUs or GPUs; how a batch is split over ranks and micro-batches changes rounding only.

    Its options are those of `DeepSpeedOptions`.
    """

    _place: ActorSpec = attrs.field(init=False)
    _ranks: Ranks = attrs.field(init=False)
    _temperature: float = attrs.field(init=False)
    _actor: Trained = attrs.field(init=False)
    _critic: Trained | None = attrs.field(init=False, default=None)
    _reference: Any = attrs.field(init=False, default=None)
    _roles: Roles = attrs.field(init=False)
    _passes: MicroBatchRunner = attrs.field(init=False)
    _updates: Any = attrs.field(init=False)
    _outlet: WeightExporter = attrs.field(init=False)
    _clock: PhaseTimer = attrs.field(init=False, factory=PhaseTimer)

    def preload(self) -> None:
        """Import DeepSpeed."""
        from rlsdk.learners import model, objective, updates  # noqa: F401

        _import_deepspeed()

    def start(self, roles: Roles, loss: LossSpec, place: ActorSpec, total_updates: int) -> None:
        """Load the models; `total_updates` is the length of the learning-rate schedule, in optimiser steps.

        Raises:
            LearnerError: A model cannot be used.
        """
        from rlsdk.learners.model import check_layers, load_critic, load_policy
        from rlsdk.learners.objective import Objective
        from rlsdk.learners.updates import Updates

        host, _, port = place.master.rpartition(":")
        os.environ.update({**self.environment(place), "MASTER_ADDR": host or "127.0.0.1", "MASTER_PORT": port or "0"})
        self._place, self._roles = place, roles
        self._ranks = Ranks.join(place.rank, place.world_size, place.device, place.master)
        tokens = self._tokens(roles, place)  # before anything is loaded
        _import_deepspeed()
        import deepspeed

        deepspeed.init_distributed(dist_backend="nccl" if place.device == "cuda" else "gloo")
        objective = Objective(loss)
        self._temperature = loss.temperature
        factor = schedule(self.schedule, self.warmup_steps, self.final_ratio, total_updates)
        actor = load_policy(roles.actor, self.attention, self.gradient_checkpointing)
        if self.rows in ("shared", "tree"):
            check_layers(actor.model.config, self.rows)
        self._passes = MicroBatchRunner.of(
            self._ranks,
            self._clock,
            self.rows,
            tokens,
            actor.model.config.get_text_config().hidden_size,
            sequence_parallel=self.sequence_parallel,
            exact_width=roles.actor.max_length if roles.actor.exact else None,
        )
        self._prepare(actor, roles.actor)
        if self.lora is not None:
            wrap(actor.model, self.lora, place.seed)
        self._actor = Trained(actor, self._setting(roles.actor, self.lr), factor, place.world_size, role="actor")
        self._outlet = WeightExporter(self._actor.engine.module.model, roles.actor, self._ranks, self.lora)
        if roles.critic is not None:
            critic = load_critic(roles.critic, self.attention, self.gradient_checkpointing, self.value_init)
            self._prepare(critic, roles.critic)
            lr = self.lr * 10 if self.critic_lr is None else self.critic_lr
            self._critic = Trained(critic, self._setting(roles.critic, lr), factor, place.world_size, role="critic")
        self._updates = Updates(
            objective=objective, passes=self._passes, trained=self._trained, seed=place.seed, device=place.device
        )
        if roles.reference is not None and not self._base_is_reference:
            reference = load_policy(roles.reference, self.attention, False)
            self._prepare(reference, roles.reference)
            self._reference = self._frozen(reference, roles.reference)

    def _tokens(self, roles: Roles, place: ActorSpec) -> int:
        """Return the token budget of a micro-batch, the same on all ranks; `auto` looks at the free memory."""
        if self.micro_batch_tokens != "auto":
            return self.micro_batch_tokens
        from rlsdk.learners.estimate import auto_tokens, free_memory

        free = free_memory(place)
        tokens = -self._ranks.all_reduce_max([-auto_tokens(self, roles, place, free)])[0]
        log.warning("micro_batch_tokens: auto is %d, with %s free", tokens, size_text(free))
        return tokens

    def _prepare(self, module: Any, model: Model) -> None:
        self._passes.adopt(module, model)
        if self.compile:
            import torch._dynamo

            # Actor, critic and reference run the same code, each with and without gradients, prompts and masks: by
            # default the ninth variant would run uncompiled.
            torch._dynamo.config.recompile_limit = 64
            # Rows are of any number and width: one graph for all of them.
            module.model.base_model.compile(dynamic=True)

    @property
    def _base_is_reference(self) -> bool:
        """True if the actor without its adapter serves as the reference, so that no second model is held."""
        return self.lora is not None and self._roles.reference == self._roles.actor

    def _setting(self, model: Model, lr: float) -> DeepSpeedConfig:
        if model.dtype == "float16":
            raise LearnerError("dtype float16 would need loss scaling, which skips steps; use bfloat16 or float32")
        return DeepSpeedConfig(
            lr=lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            grad_clip=self.grad_clip,
            stage=1 if model.dtype == "bfloat16" and self.zero_stage == 0 else self.zero_stage,
            offload=self.offload,
            dtype=model.dtype,
            device=self._place.device,
            skip_limit=self.skip_limit,
        )

    def _frozen(self, module: nn.Module, model: Model) -> Any:
        module.requires_grad_(False).eval()
        if self.zero_stage < 3:
            return module.to(self._place.device)
        import deepspeed

        return deepspeed.initialize(model=module, config=self._setting(model, 0.0).inference)[0]

    def logprobs(
        self, batch: TrainBatch, role: Literal["actor", "reference"] = "actor", fields: Sequence[str] = ("logprobs",)
    ) -> dict[str, np.ndarray]:
        """float32 `[t]` each, without a graph: of `logprobs`, `entropy`, `probs_squared_sum` those asked for.

        Raises:
            LearnerError: The learner does not hold that role.
        """
        if role == "reference":  # it chooses its own experts
            batch = attrs.evolve(batch, context={k: v for k, v in batch.context.items() if k != "routed_experts"})
        off = role == "reference" and self._base_is_reference
        model = self._actor if role == "actor" or off else self._reference
        if model is None:
            raise LearnerError(f"this learner holds no {role}")
        entropy, squares = "value" if "entropy" in fields else "none", "probs_squared_sum" in fields
        names = ("logprobs", "entropy", "probs_squared_sum")

        def run(rows: Any) -> dict[str, Tensor]:
            results = self._passes.run(model, rows, self._temperature, entropy, squares)
            return {name: result for name, result in zip(names, results, strict=True) if name in fields}

        with switched_off(self._actor.engine.module) if off else nullcontext():
            return self._forward(f"the forward pass of the {role}", run, batch, fields)

    def _forward(self, what: str, run: Any, batch: TrainBatch, fields: Sequence[str]) -> dict[str, np.ndarray]:
        passes = partial(self._passes.forward, run, batch, fields)
        return with_less(self._passes, what, passes, again=passes, why_not=self._actor.repeat_fault)

    def values(self, batch: TrainBatch) -> np.ndarray:
        """float32 `[t]`: the critic's, of the state in which each response token was chosen.

        Raises:
            LearnerError: The learner has no critic.
        """
        critic = self._critic
        if critic is None:
            raise LearnerError("this learner holds no critic")
        run = self._passes.run
        found = self._forward(
            "the critic's forward pass", lambda rows: {"values": run(critic, rows)}, batch, ("values",)
        )
        return found["values"]

    def update(self, minibatches: Sequence[tuple[TrainBatch, int, int]], step: int) -> dict[str, float]:
        """Take one optimiser step per minibatch (this rank's share, trained tokens and trained rollouts of all ranks).

        Returns:
            Metrics, the same on every rank, exact over micro-batches and ranks: means over trained tokens; of losses,
            norms and learning rates means over optimiser steps. Updates that were skipped are counted, and leave no
            other metric.

        Raises:
            LearnerError: More than `skip_limit` gradients in a row were not finite.
        """
        found: dict[str, float] = self._updates.update(minibatches, step)
        return found

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
        """Add the gradient of this rank's rollouts to that of the optimiser step; see `GivesPrimitives`.

        A loss that reads `x.whole` gets the rollouts of this call, over all ranks.

        Raises:
            LearnerError: The learner does not train that role.
        """
        self._updates.forward_backward(batch, totals, role=role, step=step, update=update, updates=updates, last=last)

    def optimizer_step(self, role: TrainedRole = "actor") -> dict[str, float]:
        """Take one optimiser step along the gradient; metrics are those that `update` returns of one such step.

        Raises:
            LearnerError: More than `skip_limit` gradients in a row were not finite.
        """
        found: dict[str, float] = self._updates.means(self._updates.optimizer_step(role), [role])
        return found

    def set_learning_rate(self, lr: float, role: TrainedRole = "actor") -> None:
        """Set the peak learning rate from the next optimiser step on; the schedule multiplies it, `save` keeps it.

        A checkpoint's learning rate that was set this way wins over `lr` and `critic_lr` of the run that resumes.

        Args:
            lr: Learning rate.
            role: Model whose learning rate it is.
        """
        self._trained[role].peak_lr = lr

    def weights(self, version: int) -> Weights | None:
        """All tensors of the actor as `save_pretrained` writes them, an adapter merged (rank 0; None elsewhere)."""
        return self._outlet.weights(version)

    @property
    def adapter(self) -> Adapter | None:
        """The shape of the adapter that can be sent to engines; None if whole models are sent."""
        return self.lora.adapter if self.lora and self.lora.sync == "adapter" else None

    def adapter_weights(self, version: int) -> Weights | None:
        """The adapter's tensors (rank 0; None elsewhere), by the names of peft's files."""
        return self._outlet.adapter_weights(version)

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `[k - 1]`: at temperature 1, of each token of `[k]` given those before it."""
        return self._passes.canary(self._actor, token_ids)

    def clock(self) -> dict[str, float]:
        """Seconds so far: `forward_seconds`, and `update_seconds` of backward passes and optimiser steps."""
        return dict(self._clock.seconds)

    def save(self, folder: Path) -> None:
        """Write what `load` needs, each rank its part, and a manifest of hashes; all ranks must see `folder`."""
        # A frozen base lies in the model's own folder.
        memory, frozen = self._updates.objective.state(), self.lora is None
        save_models(folder, self._trained, self._ranks, self._facts, memory=memory, frozen=frozen)

    def load(self, folder: Path) -> None:
        """Continue from a folder that `save` wrote; no file is opened unless all hashes match, and nothing is executed.

        Raises:
            CheckpointError: A file is missing or changed, or the learner was set up otherwise.
        """
        memory = load_models(folder, self._trained, self._ranks, self._facts, frozen=self.lora is None)
        self._updates.objective.restore(memory)

    @property
    def _trained(self) -> dict[TrainedRole, Trained]:
        return {"actor": self._actor} if self._critic is None else {"actor": self._actor, "critic": self._critic}

    @property
    def _facts(self) -> dict[str, Any]:
        facts = {"zero_stage": self.zero_stage, "dtype": self._roles.actor.dtype, "roles": sorted(self._trained)}
        return {**facts, "lora": self.lora and self.lora.facts}

    def export(self, folder: Path) -> None:
        """Write what `transformers.from_pretrained` opens: weights (safetensors), config, tokenizer; rank 0 writes.

        An adapter is merged into the weights, and lies beside them in `adapter` as peft writes it.
        """
        self._outlet.export(folder)

    def stop(self) -> None:
        """Free everything."""
        import torch.distributed as dist

        for trained in self._trained.values():
            trained.engine.destroy()
        if dist.is_initialized():
            dist.destroy_process_group()


def _import_deepspeed() -> None:
    """Import DeepSpeed for the first time in this process, without what nothing here uses and every start would pay.

    Its shared-memory collectives, for inference, are 22 s of g++. Its autotuner imports MLflow where that is installed:
    over a second.
    """
    with hidden("mlflow"):
        import deepspeed.ops
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
