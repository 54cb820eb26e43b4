"""Wrap a transformers model to compute logprobs or values at response positions only."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from rlsdk.contracts import Model
from rlsdk.conversion import policy_class
from rlsdk.errors import LearnerError
from rlsdk.head import EntropyMode, Head, logit_scale
from rlsdk.learners.model_faults import policy_faults
from rlsdk.learners.options import Attention, ValueInit
from rlsdk.learners.router import ExpertUse, RouterLoss
from rlsdk.learners.rows import Prompts, TokenRows, tree_mask
from rlsdk.routing import Routers
from rlsdk.vision import Vision, sees


class PolicyModel(nn.Module):
    """Backbone and output head; the head returns logprobs and entropies, never logits.

    Attributes:
        model: A transformers causal language model whose head is a `Head`; names in its `state_dict` are unchanged.
        router_loss: Load-balancing loss that the learner or the model's config asks for, if any.
        vision: Image processing of the model; None for a text model.
        dropouts: Rates of dropout in the config that the model was loaded with, by part and name.
    """

    def __init__(
        self,
        model: Any,
        *,
        exact: bool,
        vision: Vision | None = None,
        router_loss: float | None,
        dropouts: Mapping[tuple[str, str], float] | None = None,
    ) -> None:
        super().__init__()
        self.vision, self.dropouts = vision, dropouts or {}
        linear = model.get_output_embeddings()
        if linear is None:
            raise LearnerError(f"{type(model).__name__} has no output embeddings; a policy is a causal language model")
        model.set_output_embeddings(Head(linear, exact=exact, scale=logit_scale(model.config)))
        self.model = model
        self.router_loss = RouterLoss.of(model.config, router_loss)
        self._routers = Routers(model)
        self._asked = {"output_router_logits": True} if self.router_loss else {}
        self._use: ExpertUse | None = None

    def forward(
        self, rows: TokenRows, temperature: float = 1.0, entropy: EntropyMode = "none", squares: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return logprobs, entropy and sum of squared probabilities, float32 `[t]`; None for those not requested."""
        outputs = _outputs(self.model.base_model, rows, self._routers, self.vision, **self._asked)
        states = _at_responses([output.last_hidden_state for output in outputs], rows)
        self._use = None
        if self.router_loss is not None and len(rows.states):
            layers = zip(*(output.router_logits for output in outputs), strict=True)
            logits = [_at_responses(layer, rows) for layer in layers]
            self._use = self.router_loss.use(logits if rows.kept is None else [each[rows.kept] for each in logits])
        results: tuple[Tensor, Tensor | None, Tensor | None] = self.model.get_output_embeddings()(
            states, rows.targets, temperature, entropy, squares
        )
        if rows.kept is None:
            return results
        logprobs, entropies, squared = (None if each is None else each[rows.kept] for each in results)
        assert logprobs is not None
        return logprobs, entropies, squared

    def take_use(self) -> ExpertUse | None:
        """Return the use of experts in the latest pass, once; None if no loss needs it."""
        use, self._use = self._use, None
        return use


class Critic(nn.Module):
    """Backbone and a value head `[1, d]`."""

    def __init__(self, backbone: Any, init: ValueInit, vision: Vision | None) -> None:
        super().__init__()
        self.model, self.vision = backbone, vision
        width = backbone.config.get_text_config().hidden_size
        self.value = nn.Linear(width, 1, bias=False, dtype=backbone.dtype)
        if init == "zero":
            nn.init.zeros_(self.value.weight)
        else:
            generator = torch.Generator().manual_seed(0)
            nn.init.normal_(self.value.weight, std=1e-2 * width**-0.5, generator=generator)

    def forward(self, rows: TokenRows) -> Tensor:
        """Return the values of the states before each response token, float32 `[t]`."""
        outputs = _outputs(self.model, rows, vision=self.vision)
        values: Tensor = self.value(_at_responses([output.last_hidden_state for output in outputs], rows))
        return values[:, 0].float() if rows.kept is None else values[rows.kept, 0].float()


def _outputs(
    backbone: Any,
    rows: TokenRows,
    routers: Routers | None = None,
    vision: Vision | None = None,
    **asked: bool,
) -> list[Any]:
    """Return the outputs of the backbone, those of shared prompts, if any, before those of the rows.

    Args:
        backbone: The model without its head.
        rows: Inputs.
        routers: Routers that replay the experts of `rows.routing`; None for no replay.
        vision: Image processing of the model; None for a text model.
        **asked: Outputs to ask for, as arguments of the backbone.

    Raises:
        LearnerError: There are images, but the model reads none.
    """
    if vision is not None:
        seen = vision.inputs(backbone, rows.input_ids, rows.image_mask, rows.images)
        return [backbone(**seen, use_cache=False, **asked)]
    if rows.images:
        raise LearnerError("rollouts contain images, but the model reads only text; set model.path to a vision model")
    if rows.prompts is not None:
        return _run_after_prompts(backbone, rows, rows.prompts, routers, **asked)
    if routers is not None:
        routers.force(rows.routing)
    mask = None
    if rows.ends is not None:
        mask = tree_mask(rows.ends)[:, None]
        if backbone.config._attn_implementation == "eager":  # it adds a mask to the scores
            low = torch.finfo(backbone.dtype).min
            mask = torch.zeros_like(mask, dtype=backbone.dtype).masked_fill(~mask, low)
    # Without `use_cache=False` the second rollout of a packed row attends to the first, without an error.
    inputs = {"input_ids": rows.input_ids, "position_ids": rows.position_ids, "attention_mask": mask}
    return [backbone(**inputs, use_cache=False, **asked)]


def _at_responses(parts: Sequence[Tensor], rows: TokenRows) -> Tensor:
    """Return the outputs from which response tokens are predicted, `[t, d]`."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])[rows.states]


def _run_after_prompts(
    backbone: nn.Module, rows: TokenRows, prompts: Prompts, routers: Routers | None, **asked: bool
) -> list[Any]:
    """Return the outputs of prompts and rows; rows attend to the keys and values of their prompt."""
    before = prompts.input_ids.numel()
    if routers is not None:
        routers.force(None if rows.routing is None else rows.routing[:before])
    read = backbone(input_ids=prompts.input_ids, use_cache=True, **asked)
    # Each row gets a copy, through which its gradient flows to the prompt.
    copies = [(layer.keys[prompts.of_row], layer.values[prompts.of_row]) for layer in read.past_key_values.layers]
    count, width = rows.input_ids.shape
    longest = prompts.input_ids.shape[1]
    mask = None
    if prompts.padded:
        columns = torch.arange(longest, device=prompts.lengths.device)
        inside = columns < prompts.lengths[prompts.of_row, None]
        mask = torch.cat([inside, inside.new_ones(count, width)], dim=1)
    if routers is not None and rows.routing is not None:
        routers.force(rows.routing[before:])
    output = backbone(
        input_ids=rows.input_ids,
        position_ids=rows.position_ids,
        attention_mask=mask,
        past_key_values=Prefix(copies),
        use_cache=True,
        **asked,
    )
    return [read, output]


def load_policy(
    model: Model, attention: Attention, checkpointing: bool, *, router_loss: float | None = None
) -> PolicyModel:
    """Load a policy from a folder or a hub id.

    Args:
        model: The model.
        attention: Its attention implementation.
        checkpointing: Recompute activations in the backward pass.
        router_loss: Weight of the load-balancing loss of a mixture of experts; None for that of the model's config.

    Raises:
        LearnerError: Weights are missing, or the model's logits are not a plain product with its head.
    """
    config = read_config(model)
    loaded = _load(policy_class(config), model, config, attention, checkpointing)
    if faults := policy_faults(loaded, attention):
        raise LearnerError(f"model {model.path}: {'; '.join(faults)}")
    # Of a vision-language model, transformers may load the language model alone, whose config is a part of the other.
    trained = next((each for each in _parts(config).values() if type(each) is type(loaded.config)), config)
    return PolicyModel(
        loaded,
        exact=model.head_dtype == "float32",
        vision=_vision(model, loaded),
        router_loss=router_loss,
        dropouts=dropouts(trained),
    )


def load_critic(model: Model, attention: Attention, checkpointing: bool, init: ValueInit) -> Critic:
    """Load a critic on the backbone of a folder or a hub id.

    Raises:
        LearnerError: Weights are missing.
    """
    from transformers import AutoModel

    loaded = _load(AutoModel, model, read_config(model), attention, checkpointing)
    return Critic(loaded, init, _vision(model, loaded))


def _vision(model: Model, net: Any) -> Vision | None:
    """Return the image processing of a vision model, if available; otherwise the model is trained on text."""
    vision = Vision(model)
    return vision if sees(net) and vision.usable else None


def blank_policy(model: Model, attention: Attention, checkpointing: bool, *, router_loss: float | None) -> PolicyModel:
    """Build a policy from its config; with fake tensors, it shows the memory of a pass without using any.

    Raises:
        LearnerError: The model cannot be trained as a policy.
    """
    config = without_dropout(read_config(model, local_files_only=True))
    net = policy_class(config).from_config(
        config,
        dtype=getattr(torch, model.dtype),
        attn_implementation=attention,
        trust_remote_code=model.trust_remote_code,
    )
    if faults := policy_faults(net, attention):
        raise LearnerError(f"model {model.path}: {'; '.join(faults)}")
    return PolicyModel(_trainable(net, checkpointing), exact=model.head_dtype == "float32", router_loss=router_loss)


def _load(auto: Any, model: Model, config: Any, attention: Attention, checkpointing: bool) -> Any:
    loaded, report = auto.from_pretrained(
        model.path,
        config=without_dropout(config),
        dtype=getattr(torch, model.dtype),
        attn_implementation=attention,
        trust_remote_code=model.trust_remote_code,
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        raise LearnerError(f"model {model.path}: {len(missing)} tensors are missing, such as {', '.join(missing[:3])}")
    # Under ZeRO-3, transformers also keeps conversions that it did not need, and would revert them when it saves.
    if (conversions := getattr(loaded, "_weight_conversions", None)) is not None:
        loaded._weight_conversions = [each for each in conversions if each.was_used()]
    return _trainable(loaded, checkpointing)


def read_config(model: Model, **options: Any) -> Any:
    """Return the config of a model."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code, **options)


def without_dropout(config: Any) -> Any:
    """Return a config without dropout: the learner's logprobs must be the engine's."""
    return with_dropouts(config, dict.fromkeys(dropouts(config), 0.0))


def dropouts(config: Any) -> dict[tuple[str, str], float]:
    """Return the rates of dropout in a config, by the name of the part that holds it ("" for the config itself)."""
    return {
        (part, name): value
        for part, each in _parts(config).items()
        for name, value in vars(each).items()
        if isinstance(value, float) and "drop" in name  # also `resid_pdrop`, `layerdrop`
    }


def with_dropouts(config: Any, rates: Mapping[tuple[str, str], float]) -> Any:
    """Return a copy of a config with rates of dropout; those of parts that it lacks are left out."""
    changed = copy.deepcopy(config)
    parts = _parts(changed)
    for (part, name), rate in rates.items():
        if part in parts:
            setattr(parts[part], name, rate)
    return changed


def _parts(config: Any) -> dict[str, Any]:
    return {"": config, **{name: getattr(config, name) for name in config.sub_configs}}


def _trainable(net: Any, checkpointing: bool) -> Any:
    if checkpointing:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    net.train()  # gradient checkpointing works only in this mode; dropout was set to 0
    for module in net.modules():
        if any("jitter" in name for name in vars(module)):  # it samples experts, or adds noise to its inputs
            module.training = False
    return net


class Prefix(Cache):
    """Cache of all layers.

    transformers' own caches also store keys and values of the rows: a compiled model would return them, with gradients
    of zeros.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Create a cache of prompt keys and values, `[rows, heads, prompt, head size]` each."""
        super().__init__(layers=[_PrefixLayer(keys, values) for keys, values in layers])


class _PrefixLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, since keys and values are given at creation."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values for attention: those of the prompts, followed by those of the rows."""
        return torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns that a mask covers, and their first."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of prompt columns."""
        return self.keys.shape[2]

    def get_max_length(self) -> int:
        """No maximum."""
        return -1
