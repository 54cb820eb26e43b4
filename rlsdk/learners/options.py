"""Options of learners that train transformers models, the checks that they imply before a start, and optimisers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import attrs

from rlsdk.components import NamesKind, Use, component_of, naming, title_of
from rlsdk.config import defaults
from rlsdk.contracts import ActorSpec, DType, MemoryUse, Roles, UpdateShape
from rlsdk.contracts.generation import DTYPE_BYTES
from rlsdk.errors import LearnerError, OptionError, RlsdkError
from rlsdk.learners.lora import Lora, adapter_fault, base_of, count_adapter
from rlsdk.learners.rows import RowStyle
from rlsdk.limits import NonNegative, Positive, Share, at_least, below
from rlsdk.options import CONVERTER
from rlsdk.plugins import CORE, Plugins, faults_of, load, short_name

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from rlsdk.learners.estimate import RankMemory

Decay = Annotated[float, at_least(0), below(1)]
Attention = Literal["sdpa", "flash_attention_2", "eager"]
ValueInit = Literal["zero", "small"]
DecayShape = Literal["linear", "cosine", "sqrt"]
DecayedParameters = Literal["all", "matrices"]
NO_FLOAT16 = "dtype float16 would need loss scaling, which skips steps; set model.dtype=bfloat16 or float32"


Group = dict[str, Any]
"""A parameter group of torch: `params`, `param_names`, `lr`, `weight_decay`, and what an optimiser adds."""
Factory = Callable[[list[Group]], Any]
"""An optimiser component, bound to its options."""
Rate = Callable[[int, int], Any]
"""A learning-rate schedule, bound to its options."""
_SIDE = 64
"""Rows and columns of the matrices on which the size of an optimiser's state is measured."""


def _as_use(value: Any) -> Use:
    return CONVERTER.structure(value, Use)


def _positive_or_auto(_: Any, __: Any, value: int | str) -> None:
    if value != "auto" and (isinstance(value, str) or value <= 0):
        raise ValueError(f"micro_batch_tokens: expected a number above 0, or auto; got {value!r}")


@attrs.define(kw_only=True, eq=False)
class LearnerOptions(ABC):
    """Options of `TransformersLearner` and of every learner built on it.

    Attributes:
        lr: Peak learning rate of the actor.
        critic_lr: Peak learning rate of the critic; default: ten times the actor's.
        optimizer: Optimiser, with its own options; only AdamW's are `betas` and `eps` of the learner.
        betas: AdamW's decay rates of the two moments.
        eps: AdamW's epsilon, added to the denominator.
        weight_decay: Weight decay of any optimiser.
        weight_decay_on: Parameters that `weight_decay` applies to: all, or matrices, which leaves out biases and
            tensors of one dimension, such as the scales of norms, as transformers' trainer does.
        grad_clip: Maximum gradient norm; 0 disables clipping.
        skip_limit: Maximum number of consecutive updates skipped for a non-finite loss or gradient; one more ends the
            run. A skipped update changes no weights and is counted in `actor/skipped_updates` or
            `critic/skipped_updates`.
        schedule: Learning-rate schedule after warm-up. constant; linear, cosine or polynomial: decay to `final_ratio`;
            inverse_sqrt: the peak times √(warm-up steps / steps so far), at least `final_ratio`; wsd
            (warmup-stable-decay): constant, then decay in the last `decay_steps`; or one of a plugin. The keys of the
            learner named here are for the built-in ones, which also take them as their own options.
        warmup_steps: Number of optimiser steps of linear warm-up.
        final_ratio: Final learning rate as a share of the peak.
        decay_steps: Number of optimiser steps of the decay, after which the learning rate stays at its final value.
            Default: all after warm-up or, with wsd, the last tenth of the run.
        decay_power: Exponent of polynomial decay; default: 2.
        decay_shape: Shape of the decay at the end of wsd: linear (the default), cosine, or sqrt (1 - √x,
            arXiv:2405.18392), which falls fast at first.
        micro_batch_tokens: Maximum number of tokens per forward pass, padding included; a longer rollout gets its own
            pass. `auto` takes up to 32768, and by the estimate of `rlsdk explain` at most half of the free memory.
        rows: Layout of a micro-batch. padded: one row per rollout, with rollouts of similar length together. packed:
            rollouts one after another, each attending only to itself (fast with flash_attention_2 or sdpa; slow with
            eager, windowed layers or compile, which mask). shared: reads each prompt once for all its rollouts, which
            pays off for large groups whose prompts are not short relative to their responses (full attention, sdpa or
            eager). tree: reads every common prefix of rollouts once, including earlier turns and branches.
        gradient_checkpointing: Recompute activations in the backward pass: a third more time, far less memory.
        attention: Attention implementation in transformers; on a CPU, eager is faster for rows of a few dozen tokens.
        value_init: Initial value head of the critic: zero predicts 0 at first; small adds a little noise.
        router_loss_coef: Weight of the load-balancing loss of a mixture of experts, computed over all rollouts of an
            optimiser step; 0 for none. Default: `router_aux_loss_coef` of the model's config, if that has
            `output_router_logits: true`.
        lora: Train low-rank adapters of the actor's linear layers instead of its weights (`rank`, `alpha`, `targets`,
            `sync`, `path`); needs about ten times the learning rate. Default: train all weights.
    """

    takes_optimizers: ClassVar[bool] = False
    """True if the learner creates its optimiser with `make_optimizer`; otherwise it always uses AdamW."""

    lr: NonNegative = 1e-6
    critic_lr: NonNegative | None = None
    optimizer: Annotated[Use, NamesKind("optimizer")] = defaults.OPTIMIZER
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    weight_decay_on: DecayedParameters = "all"
    grad_clip: NonNegative = 1.0
    skip_limit: Annotated[int, at_least(0)] = 5
    schedule: Annotated[Use, NamesKind("lr_schedule")] = attrs.field(default=defaults.LR_SCHEDULE, converter=_as_use)
    warmup_steps: Annotated[int, at_least(0)] = 0
    final_ratio: Share = 0.1
    decay_steps: Annotated[int, at_least(1)] | None = None
    decay_power: Positive | None = None
    decay_shape: DecayShape | None = None
    micro_batch_tokens: int | Literal["auto"] = attrs.field(default=16384, validator=_positive_or_auto)
    rows: RowStyle = "padded"
    gradient_checkpointing: bool = False
    attention: Attention = "sdpa"
    value_init: ValueInit = "zero"
    router_loss_coef: NonNegative | None = None
    lora: Lora | None = None
    _factory: Factory = attrs.field(init=False, repr=False)
    _rate: Rate = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._check_schedule()
        self._check_optimizer()
        if self.rows == "shared" and self.gradient_checkpointing:
            raise ValueError("rows: shared keeps the keys of prompts, gradient_checkpointing drops them; choose one")
        if self.rows in ("shared", "tree") and self.attention == "flash_attention_2":
            raise ValueError(
                f"rows: {self.rows} needs attention: sdpa or eager; use flash_attention_2 with rows: packed"
            )

    def _check_schedule(self) -> None:
        if faults := faults_of("lr_schedule", self.schedule, "schedule"):
            raise OptionError("learner", faults)
        readers = _read_by_schedules()
        shared = readers.get(self.schedule_name, ())
        for option in ("decay_steps", "decay_power", "decay_shape"):
            if getattr(self, option) is not None and option not in shared:
                kinds = " or ".join(name for name, options in readers.items() if option in options)
                raise ValueError(f"{option} belongs to schedule: {kinds}; got schedule: {self.schedule_name}")
        usual = {field.name: field.default for field in attrs.fields(type(self))}
        for option in shared:
            if getattr(self, option) != usual[option] and option in self.schedule.options:
                raise OptionError("learner", [(f"schedule.{option}", f"given twice: learner.{option} is the same")])
        inherited = {name: getattr(self, name) for name in shared}
        self._rate = load("lr_schedule", self.schedule.name, **{**inherited, **self.schedule.options})

    @property
    def schedule_name(self) -> str:
        """Name of the learning-rate schedule as in a configuration."""
        name = self.schedule.name
        return short_name(name) if isinstance(name, str) else title_of(name)

    def _check_optimizer(self) -> None:
        faults = faults_of("optimizer", self.optimizer, "optimizer")
        if self.optimizer.name == defaults.OPTIMIZER.name:
            shared = {f"optimizer.{name}": name for name in self.optimizer.options if name in ("betas", "eps")}
            faults = [
                (path, f"AdamW takes it from the learner; set learner.{shared[path]}")
                if path in shared
                else (path, text)
                for path, text in faults
            ]
        if faults:
            raise OptionError("learner", faults)
        self._factory = load("optimizer", self.optimizer.name, **self.optimizer.options)
        if self.uses_adamw:
            return
        if not self.takes_optimizers:
            raise ValueError(f"optimizer: this learner always uses AdamW; got {self.optimizer_name}")
        defaults_of = {field.name: field.default for field in attrs.fields(type(self))}
        for option in ("betas", "eps"):
            if getattr(self, option) != defaults_of[option]:
                remedy = "set the optimiser's own options under learner.optimizer: {use: …}"
                raise ValueError(f"{option} belongs to optimizer: adamw; got {self.optimizer_name}; {remedy}")

    @property
    def uses_adamw(self) -> bool:
        """True if the optimiser is the built-in AdamW."""
        chosen, adamw = component_of(self._factory), component_of(load("optimizer", defaults.OPTIMIZER.name))
        return chosen is adamw

    @property
    def optimizer_name(self) -> str:
        """Name of the optimiser as in a configuration."""
        name = self.optimizer.name
        component = component_of(self._factory)
        return short_name(name) if isinstance(name, str) or component is None else component.name

    @property
    def needs_whole_tensors(self) -> bool:
        """True if the optimiser needs tensors in their shapes, not flattened or sharded."""
        component = component_of(self._factory)
        return component is not None and component.whole_tensors

    @property
    def state_bytes(self) -> float:
        """Bytes of the optimiser's state per trained parameter."""
        return state_bytes(self._factory)

    def rate_factor(self, total_updates: int) -> Callable[[int], float]:
        """Return the share of the peak learning rate after a number of optimiser steps, out of `total_updates`.

        The function raises `LearnerError` if the schedule gives anything but a finite number of at least 0.
        """
        warmup, steps = self.warmup_steps, max(0, total_updates - self.warmup_steps)

        def factor(done: int) -> float:
            if done < warmup:
                return (done + 1) / warmup
            with naming(self._rate):
                share = self._rate(done - warmup, steps)
            if not isinstance(share, int | float) or not math.isfinite(share) or share < 0:
                raise LearnerError(
                    f"{title_of(self._rate)} returned {share!r} for step {done - warmup} of {steps}; expected the "
                    "share of the peak learning rate, a finite number of at least 0"
                )
            return float(share)

        return factor

    def make_optimizer(self, groups: Sequence[Mapping[str, Any]], lr: float) -> Optimizer:
        """Create the optimiser of a trained module.

        Args:
            groups: Parameter groups, each with `params` and `param_names`, and with `weight_decay` if it is not the
                learner's.
            lr: Learning rate.

        Raises:
            LearnerError: The component did not return an optimiser of these parameters.
            RunError: The component failed.
        """
        settings: dict[str, Any] = {"lr": lr, "weight_decay": self.weight_decay}
        if self.uses_adamw:
            settings |= {"betas": self.betas, "eps": self.eps}
        return created(self._factory, [{**settings, **group} for group in groups])

    def check_readers(self, option: str) -> None:
        """Reject row layouts that ranks cannot split; `option` names the setting of the number of ranks."""
        if self.readers > 1 and (self.rows == "shared" or self.attention != "sdpa"):
            needed = f"{option} needs rows: padded, packed or tree, and attention: sdpa (torch's flash kernel on a GPU)"
            raise ValueError(f"{needed}; got rows: {self.rows} and attention: {self.attention}")
        if self.readers > 1 and self.router_loss_coef:
            raise ValueError(
                f"router_loss_coef: ranks that share rollouts do not compute it; set {option}=1, or 0 for this option"
            )

    def undecayed(self, module: nn.Module) -> frozenset[str]:
        """Return the names of a module's trained parameters that `weight_decay` does not apply to."""
        if self.weight_decay_on == "all":
            return frozenset()
        # ZeRO-3 replaces a sharded parameter by an empty one and keeps its shape in `ds_shape`.
        shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in module.named_parameters() if p.requires_grad}
        return frozenset(name for name, shape in shapes.items() if len(shape) < 2 or "bias" in name.rpartition(".")[2])

    @property
    def requires(self) -> tuple[str, ...]:
        """Packages that these options require."""
        flash = ("flash-attn",) if self.attention == "flash_attention_2" else ()
        return (*(("peft",) if self.lora else ()), *flash)

    @property
    def readers(self) -> int:
        """Number of ranks that share the tokens of each rollout."""
        return 1

    @property
    def packs_without_mask(self) -> bool:
        """True if packed rollouts can attend separately, if the model allows it; False if a mask separates them."""
        return self.rows == "packed" and self.attention == "sdpa"

    @abstractmethod
    def rank_memory(self, roles: Roles, place: ActorSpec) -> RankMemory:
        """Return the memory of a rank without activations, from the models' configs."""

    def update_memory(self, roles: Roles, place: ActorSpec, shape: UpdateShape) -> Sequence[MemoryUse]:
        """Estimate the peak memory of a rank without loading weights; see `EstimatesUpdates`."""
        from rlsdk.learners.estimate import update_memory

        return update_memory(self, roles, place, shape)

    def checkpoint_bytes(self, model: Any, dtype: DType, *, critic: bool) -> int:
        """Estimate the bytes of a role's checkpoint: trained weights, a copy in float32, and the optimiser's state."""
        if self.lora is not None and not critic:
            trained = count_adapter(model, self.lora)
        else:
            trained = sum(p.numel() for p in model.parameters())
        return trained * (DTYPE_BYTES[dtype] + 4) + int(trained * self.state_bytes)

    def model_faults(self, model: Any) -> Sequence[str]:
        """Return why a model cannot be trained with these options; the model may have no weights."""
        import torch

        from rlsdk.learners.model_faults import policy_faults
        from rlsdk.learners.router import router_faults, shared_rows_fault

        faults = [NO_FLOAT16] if model.dtype == torch.float16 else []
        if not self.uses_adamw:
            try:
                _ = self.state_bytes  # a step on small tensors
            except RlsdkError as error:
                faults.append(str(error))
        if self.attention == "flash_attention_2" and model.dtype == torch.float32:
            faults.append(
                "flash attention cannot compute in float32; set model.dtype=bfloat16 or learner.attention=sdpa"
            )
        faults += policy_faults(model, self.attention, self.rows, without_mask=self.packs_without_mask)
        if self.router_loss_coef:
            faults += router_faults(model)
        if self.readers > 1 and (unshared := shared_rows_fault(model, self.router_loss_coef)):
            faults.append(unshared)
        if self.lora and (unadapted := adapter_fault(model, self.lora)):
            faults.append(unadapted)
        return faults

    @property
    def adapter_base(self) -> str:
        """Base model in the files of `lora.path`; see `ContinuesAdapter`."""
        return base_of(self.lora.path) if self.lora and self.lora.path else ""

    def exact_faults(self) -> Sequence[str]:
        """Return the options that conflict with `model.exact`."""
        reasons = {
            "lora multiplies by the adapter separately, the engine by merged weights": self.lora is not None,
            f"rows: {self.rows} puts several rollouts into one row": self.rows != "padded",
            f"attention: {self.attention} sums in a different order than the engine's sdpa": self.attention != "sdpa",
        }
        return [f"{reason}; leave it out" for reason, given in reasons.items() if given]


@cache
def _read_by_schedules() -> dict[str, tuple[str, ...]]:
    """Return the options of each built-in learning-rate schedule: the learner has keys of the same names for them."""
    built_in = Plugins().components(CORE, "lr_schedule")
    return {name: tuple(option.name for option in each.options) for (_, name), each in built_in.items()}


def created(factory: Factory, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """Create an optimiser of parameter groups.

    Raises:
        LearnerError: The component returned something else, or an optimiser of other parameters.
        RunError: The component failed.
    """
    import torch

    parameters = [parameter for group in groups for parameter in group["params"]]
    with naming(factory):
        optimizer = factory([{**group, "params": list(group["params"])} for group in groups])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise LearnerError(
            f"{title_of(factory)} returned a {type(optimizer).__name__}; expected a torch.optim.Optimizer"
        )
    grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(grouped) != len(parameters) or {id(each) for each in grouped} != {id(each) for each in parameters}:
        raise LearnerError(
            f"{title_of(factory)} has {len(grouped)} of {len(parameters)} parameters in its groups; each parameter "
            "that it is given must be in one group"
        )
    return optimizer


def state_bytes(factory: Factory) -> float:
    """Measure the bytes of an optimiser's state per parameter, on small float32 tensors.

    If its state differs between layers and embeddings, the greater number counts, since embeddings may be most of a
    small model.

    Raises:
        LearnerError: It is not an optimiser; see `created`.
        RunError: It failed.
    """
    import torch

    most = 0.0
    for name in ("model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"):
        parameter = torch.nn.Parameter(torch.ones(_SIDE, _SIDE))
        optimizer = created(factory, [{"params": [parameter], "param_names": [name], "lr": 1e-3, "weight_decay": 0.0}])
        parameter.grad = torch.ones_like(parameter)
        with naming(factory):
            optimizer.step()
        tensors = [
            each for each in optimizer.state[parameter].values() if isinstance(each, torch.Tensor) and each.dim()
        ]
        most = max(most, sum(each.numel() * each.element_size() for each in tensors) / parameter.numel())
    return most
