"""LoRA for the actor with peft: adapters on frozen linear layers, merged out of place, disabled for the reference."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from rlsdk.contracts import Adapter, Model
from rlsdk.errors import LearnerError
from rlsdk.limits import Count, Positive
from rlsdk.vision import tower_names

if TYPE_CHECKING:
    from torch import Tensor, nn

_NAME = "default"
"""Name that peft gives an adapter by default."""
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter in peft's format."""
_A, _B, _BASE = f"lora_A.{_NAME}.weight", f"lora_B.{_NAME}.weight", "base_layer."


def _whole_names(_: Any, __: Any, value: str | tuple[str, ...]) -> None:
    if not value or (not isinstance(value, str) and not all(value)):
        raise ValueError("lora.targets is empty; give all-linear, or names of linear layers such as [q_proj, v_proj]")


@attrs.frozen(kw_only=True)
class Lora:
    """Train `W + alpha / rank · B · A` with `W` frozen (LoRA, arXiv:2106.09685, section 4.1).

    There is no dropout, since the learner's logprobs must equal the engine's and those of its own earlier passes.

    The modules of a vision-language model that read images are frozen, since engines cannot adapt them.

    Attributes:
        rank: Rank of the adapter: `A` is `[rank, in]`, initialised at random; `B` is `[out, rank]`, initialised to
            zero.
        alpha: Numerator of the scale `alpha / rank`.
        targets: Layers to adapt: all-linear (all but the output head), or names or name suffixes.
        sync: Weights sent to engines: the adapter if they can load one, or always merged weights.
        path: Folder of an adapter in peft's format to continue from, which must have this rank, scale and layers;
            default: a new adapter. The base model stays the reference.
    """

    rank: Count = 16
    alpha: Positive = 32.0
    targets: Literal["all-linear"] | tuple[str, ...] = attrs.field(default="all-linear", validator=_whole_names)
    sync: Literal["adapter", "merged"] = "adapter"
    path: str | None = None

    @property
    def adapter(self) -> Adapter:
        """Shape of the adapter, as engines need it."""
        return Adapter(rank=self.rank, alpha=self.alpha)

    @property
    def facts(self) -> dict[str, Any]:
        """Settings that must agree between a checkpoint and the learner that loads it."""
        targets = self.targets if isinstance(self.targets, str) else sorted(self.targets)
        return {"rank": self.rank, "alpha": self.alpha, "targets": targets}


def wrap(model: Any, lora: Lora, seed: int) -> None:
    """Freeze a transformers model and add adapters to its linear layers in place, identically on every rank.

    Adapters have the model's dtype, which the engine also uses. DeepSpeed's optimiser keeps a float32 copy of weights
    that it trains in bfloat16, so no step is lost to rounding.

    Raises:
        LearnerError: A target is missing, or is not a `torch.nn.Linear`.
    """
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        exclude_modules="|".join(rf"{re.escape(name)}\..*" for name in tower_names(model)) or None,
        lora_dropout=0.0,
        bias="none",
    )
    head, modules = model.get_output_embeddings(), _language_modules(model)
    linear = {
        name.rpartition(".")[2]
        for name, each in modules.items()
        if isinstance(each, torch.nn.Linear) and each is not head
    }
    what = f"lora.targets {lora.targets!r} of a {type(model).__name__}"
    known = f"its linear layers are: {', '.join(sorted(linear)) or 'none'}"
    if isinstance(targets, list):  # peft objects only if it finds none of them
        named = {t: [each for name, each in modules.items() if f".{name}".endswith(f".{t}")] for t in targets}
        if absent := [target for target, found in named.items() if not found]:
            raise LearnerError(f"{what} cannot be adapted; {known}; no layer is called {', '.join(absent)}")
        if any(each is head for found in named.values() for each in found):
            raise LearnerError(f"{what} cannot be adapted; {known}; the output head is never adapted")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # the model is still on the CPU
        torch.manual_seed(seed)
        warnings.simplefilter("ignore")  # peft warns of layers that are refused below, such as fused experts
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            raise LearnerError(f"{what} cannot be adapted; {known} (peft says: {error})") from error
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and not isinstance(layer.get_base_layer(), torch.nn.Linear):
            kind = type(layer.get_base_layer()).__name__
            fused = " (the experts of a layer are one fused tensor)" if "experts" in name else ""
            raise LearnerError(
                f"{what}: {name} is a {kind}, and only torch.nn.Linear is adapted{fused}; {known}; give lora.targets "
                "some of them, or leave learner.lora out to train all weights"
            )
    if lora.path is not None:
        _continue_from(lora.path, model, lora)


def _continue_from(path: str, model: Any, lora: Lora) -> None:
    """Copy an adapter's weights into a wrapped model; one without weights is only compared with it.

    Raises:
        LearnerError: The adapter cannot be read, or differs from the one that `lora` describes.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    folder = Path(path).expanduser()
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        if fault := _config_fault(config, lora):
            raise LearnerError(f"lora.path {path!r}: {fault}")
        parameters = peft_names(dict(model.named_parameters()))
        with safe_open(str(folder / _TENSORS), "pt") as file, torch.no_grad():
            names = set(file.keys())
            targets = config.get("target_modules")
            layers = f"its target_modules are {targets}; set learner.lora.targets to the same layers"
            if odd := names - set(parameters):
                raise LearnerError(f"lora.path {path!r} has {len(odd)} tensors that fit nowhere: {min(odd)}; {layers}")
            if odd := set(parameters) - names:
                raise LearnerError(f"lora.path {path!r} lacks {len(odd)} tensors, such as {min(odd)}; {layers}")
            for name, parameter in parameters.items():
                shape = tuple(file.get_slice(name).get_shape())
                if shape != tuple(parameter.shape):
                    raise LearnerError(
                        f"lora.path {path!r}: {name} has the shape {shape}, this model needs {tuple(parameter.shape)}: "
                        "it was trained on another model"
                    )
                if not parameter.is_meta:
                    parameter.copy_(file.get_tensor(name))
    except (OSError, ValueError, AttributeError, SafetensorError) as error:
        below = folder / "adapter"  # in an export
        hint = f"; did you mean {str(below)!r}?" if (below / _CONFIG).is_file() else ""
        raise LearnerError(
            f"lora.path {path!r} is not the folder of an adapter with {_CONFIG} and {_TENSORS}: {error}{hint}"
        ) from error


def base_of(path: str) -> str:
    """Return the base model that the files of an adapter name; empty if they name none or cannot be read."""
    try:
        config = json.loads((Path(path).expanduser() / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # reported when the adapter is opened
        return ""
    base = config.get("base_model_name_or_path") if isinstance(config, Mapping) else None
    return base if isinstance(base, str) else ""


def _config_fault(config: Mapping[str, Any], lora: Lora) -> str:
    """Return why the adapter of a peft config cannot be continued with these options; empty if it can."""
    if config.get("peft_type") != "LORA":
        return f"expected peft_type LORA, got {config.get('peft_type')!r}"
    kinds = {"use_dora": False, "bias": "none", "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None}
    odd = {name: config[name] for name, usual in kinds.items() if config.get(name) not in (None, usual)}
    if odd:
        return f"only plain adapters of one rank are trained; it has {odd}"
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        return f"expected numbers as r and lora_alpha; got {rank!r} and {alpha!r}"
    if config.get("use_rslora"):  # its scale is alpha / sqrt(rank)
        alpha *= rank**0.5
    if rank == lora.rank and math.isclose(alpha, lora.alpha):
        return ""
    got = f"got rank {lora.rank} and alpha {lora.alpha:g}"
    return f"set learner.lora.rank={rank} and learner.lora.alpha={alpha:g}, as the adapter has them; {got}"


def _language_modules(model: Any) -> dict[str, Any]:
    """Return the modules of a model by name, without those that read images."""
    tower = tuple(f"{name}." for name in tower_names(model))
    return {name: module for name, module in model.named_modules() if not f"{name}.".startswith(tower)}


def adapter_fault(model: Any, lora: Lora) -> str:
    """Return why a model cannot be adapted; empty if it can or peft is not installed. The model may have no weights."""
    if find_spec("peft") is None:
        return ""
    try:
        wrap(deepcopy(model), lora, seed=0)
    except LearnerError as error:
        return str(error)
    return ""


def count_adapter(model: Any, lora: Lora) -> int:
    """Count the parameters of adapters that `wrap` would add; the model may have no weights."""
    import torch

    def adapted(name: str, module: Any) -> bool:
        if not isinstance(module, torch.nn.Linear) or module is model.get_output_embeddings():
            return False
        return lora.targets == "all-linear" or any(name == t or name.endswith(f".{t}") for t in lora.targets)

    layers = [module for name, module in _language_modules(model).items() if adapted(name, module)]
    return sum(lora.rank * (layer.in_features + layer.out_features) for layer in layers)


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Context manager that disables the adapters, so that the base serves as the reference: they run with scale 0.

    They still run, because ZeRO-3 fetches weights in the order in which modules ran before, and peft's own switch would
    also turn off `requires_grad`, on which DeepSpeed relies.
    """
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.set_scale(_NAME, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(_NAME, 1.0)


def is_adapter(name: str) -> bool:
    """Return True if a tensor in the `state_dict` of a wrapped model belongs to an adapter."""
    return name.endswith((_A, _B))


def merged(tensors: Mapping[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """Return the tensors of the merged model: `W + alpha / rank · B · A`, summed in float32 and cast once.

    Args:
        tensors: All tensors of a wrapped model, by `state_dict` name; none is changed.
        lora: LoRA options, for the scale.

    Returns:
        Tensors by transformers' names; those without an adapter are returned as they are.
    """
    whole = {}
    for name, tensor in tensors.items():
        if is_adapter(name):
            continue
        stem, base, rest = name.rpartition(_BASE)
        if base and rest == "weight":
            delta = tensors[stem + _B].float() @ tensors[stem + _A].float()
            tensor = (tensor.float() + lora.adapter.scale * delta).to(tensor.dtype)
        whole[stem + rest] = tensor
    return whole


def peft_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapter's tensors by the names in peft's files."""
    return {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": tensor
        for name, tensor in tensors.items()
        if is_adapter(name)
    }


def write_adapter(folder: Path, model: Any, tensors: Mapping[str, Tensor], source: Model) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained` can open.

    Args:
        folder: Target folder, created if missing.
        model: The wrapped model, for its peft config.
        tensors: All tensors of the model, unsharded.
        source: The base model.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = model.peft_config[_NAME]
    config.base_model_name_or_path = source.path
    config.task_type = "CAUSAL_LM"
    config.save_pretrained(folder)
    contents = {name: tensor.cpu().contiguous() for name, tensor in peft_names(tensors).items()}
    save_file(contents, str(folder / _TENSORS), metadata={"format": "pt"})
