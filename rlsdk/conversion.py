"""Convert tensors between a model's checkpoint and memory, where names and shapes differ.

In memory, transformers fuses a layer's experts into one tensor, and renames some models' heads and prefixes. Engines
read checkpoints, so weights are sent as `save_pretrained` would write them, and a receiver with a transformers model
converts them like `from_pretrained`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

import attrs

from rlsdk.contracts import Model
from rlsdk.errors import ValueFault, first_line
from rlsdk.vision import TYPES

if TYPE_CHECKING:
    from torch import Tensor

WEIGHT_FILES = tuple((name, f"{name}.index.json") for name in ("model.safetensors", "pytorch_model.bin"))
"""Files by which transformers finds weights, in this order: a single file, or the index of several."""
_NUMBER = re.compile(r"\.\d+\.")


def by_layer(names: Iterable[str]) -> list[set[str]]:
    """Split names into groups that are converted together: one per layer, and one for the rest."""
    groups: dict[str, set[str]] = {}
    for name in names:
        number = _NUMBER.search(name)
        groups.setdefault(name[: number.end()] if number else "", set()).add(name)
    return list(groups.values())


def aliases(model: Any) -> set[str]:
    """Return names in a model's `state_dict` that a checkpoint omits, since they are tied to another tensor."""
    held = model.state_dict(keep_vars=True)
    tied: Mapping[str, str] = model.all_tied_weights_keys
    return {name for name, source in tied.items() if name in held and held[name] is held.get(source)}


def to_checkpoint(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors to the form that `save_pretrained` writes.

    Args:
        model: The transformers model that defines the conversions; its tensors are not read.
        tensors: Whole layers of its `state_dict`, tied tensors once.

    Returns:
        Views or copies of the tensors, by checkpoint name.
    """
    from transformers.core_model_loading import revert_weight_conversion

    unwanted = set(model._keys_to_ignore_on_save or ())
    return dict(revert_weight_conversion(model, {n: t for n, t in tensors.items() if n not in unwanted}))


def from_checkpoint(model: Any, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Convert a checkpoint's tensors to a model's `state_dict` entries, one at a time.

    The model defines names and conversions, and is not changed. Tensors unknown to it keep their names.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        conversions = get_model_conversion_mapping(model)
    yield from _convert(model, tensors, conversions)


def _convert(model: Any, tensors: Mapping[str, Tensor], conversions: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Rename and fuse like transformers' loader (transformers.core_model_loading)."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    known = model.state_dict()
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    fused: dict[str, Any] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if pattern is None or (target not in known and name in known):
            yield (target if target in known else name), tensors[name]
            continue
        if target not in fused:
            fused[target] = deepcopy(of_pattern[pattern])
        fused[target].add_tensor(target, name, pattern, tensors[name])
    for target, converter in fused.items():
        for name, values in converter.convert(target, model=model, config=model.config).items():
            yield name, values[0] if isinstance(values, list) else values


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes that `save_pretrained` would write for a model, which may be on the meta device."""
    left_out = aliases(model)
    tensors = {name: tensor.to("meta") for name, tensor in model.state_dict().items() if name not in left_out}
    return {name: tuple(tensor.shape) for name, tensor in to_checkpoint(model, tensors).items()}


def read_header(path: str) -> dict[str, tuple[int, ...]] | None:
    """Read tensor names and shapes from a model's files of weights; None if there are none on this machine.

    Only files that transformers loads are read: a folder may hold others, such as `consolidated.safetensors`. Those
    that torch before 1.6 wrote are not read, since that would load their weights: None if there are any.

    Raises:
        ValueFault: A file is damaged or missing.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(path) if Path(path).is_dir() else Path(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    name, index = next((pair for pair in WEIGHT_FILES if any((folder / each).is_file() for each in pair)), ("", ""))
    if not name:
        return None
    files = {name}
    if not (folder / name).is_file():
        try:
            files = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueFault(
                f"{folder / index} names no files of weights ({error!r}); copy or download it again"
            ) from error
    found: dict[str, tuple[int, ...]] = {}
    for file in [folder / name for name in sorted(files)]:
        if not file.is_file():
            raise ValueFault(
                f"{file} is missing, but {folder / index} names it; copy or download the whole model again"
            )
        if (held := _tensors_in(file)) is None:
            return None
        found |= held
    return found or None


def _tensors_in(file: Path) -> dict[str, tuple[int, ...]] | None:
    """Return names and shapes in a file of weights; None for one that torch before 1.6 wrote."""
    import torch
    from safetensors import SafetensorError, safe_open

    remedy = "copy or download it again (it may be cut off, or a pointer of Git LFS)"
    if file.suffix != ".safetensors":
        with file.open("rb") as opened:
            if opened.read(1) == b"\x80":  # as torch before 1.6 wrote
                return None
            if not is_zipfile(opened):
                raise ValueFault(f"{file} is not a complete file of torch.save: {remedy}")
        try:
            held = torch.load(file, map_location="meta", weights_only=True, mmap=True)
            return {name: tuple(tensor.shape) for name, tensor in held.items()}
        except (RuntimeError, UnpicklingError, AttributeError) as error:
            raise ValueFault(f"{file} holds no plain weights of a model ({first_line(error)}): {remedy}") from error
    try:
        with safe_open(str(file), framework="np") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueFault(f"{file} is not a complete safetensors file ({error}): {remedy}") from error


def without_weights(model: Model, **options: Any) -> Any:
    """Build a causal language model from its config on torch's meta device, in its compute dtype.

    Args:
        model: Folder or hub id.
        **options: Further arguments of `AutoConfig.from_pretrained`.
    """
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code, **options)
    with torch.device("meta"):
        return policy_class(config).from_config(
            config, dtype=getattr(torch, model.dtype), trust_remote_code=model.trust_remote_code
        )


def policy_class(config: Any) -> Any:
    """Return the transformers class that loads a policy of this config: a causal or a vision-language model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    known = AutoModelForCausalLM._model_mapping
    # Models with custom code are not registered.
    if type(config) in known or config.model_type not in TYPES:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def adopt_names(net: Any, names: Iterable[str]) -> None:
    """Make a model convert names as if it had been loaded from files with these names.

    Args:
        net: A model without weights, changed in place.
        names: Names of the tensors in its files.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(net)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    for name in sorted(names, key=dot_natural_key):
        rename_source_key(name, renamings, converters)
    # Transformers records this when it loads a model: it writes some prefixes only if it read them.
    net._weight_conversions = [each for each in conversions if each.was_used()]


def trained_shapes(model: Model) -> dict[str, tuple[int, ...]] | None:
    """Return names and shapes that a learner of this model sends; None if `read_header` reads none."""
    header = read_header(model.path)
    if header is None:
        return None
    net = without_weights(model)
    adopt_names(net, header)
    return shapes(net)


@attrs.frozen
class Differences:
    """Differences between a model's files and the model as it would be saved.

    Attributes:
        missing: Names missing from the files.
        extra: Names missing from the model.
        misshapen: Name, shape in the files, and shape in the model, as text.
    """

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    misshapen: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.misshapen)


def compare(net: Any, header: Mapping[str, tuple[int, ...]]) -> Differences:
    """Compare a model without weights with its files, based on what transformers would write for it.

    Not counted as differences: tensors that transformers omits on purpose, such as layers for multi-token prediction,
    a missing or superfluous backbone prefix, and a tied tensor stored twice. If the model is the text part of a
    multimodal one, the towers of other modalities are not compared.

    Args:
        net: The model; its conversions are set to those of the files.
        header: Names and shapes in the files.
    """
    adopt_names(net, header)
    prefix = f"{net.base_model_prefix}."
    sent, state = shapes(net), net.state_dict()
    tied = to_checkpoint(net, {name: state[name] for name in aliases(net)})
    held = {name.removeprefix(prefix): shape for name, shape in header.items()}
    known = {name.removeprefix(prefix) for name in (*sent, *tied)}
    buffers = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", r"\.(attn|attention)\.(masked_)?bias$")
    unread = [*(net._keys_to_ignore_on_load_unexpected or ()), *buffers]
    extra = [n for n in header if n.removeprefix(prefix) not in known and not any(re.search(p, n) for p in unread)]
    is_part = type(net).__name__ not in (net.config.architectures or [type(net).__name__])
    of_both = {name: held[name.removeprefix(prefix)] for name in sent if name.removeprefix(prefix) in held}
    return Differences(
        missing=tuple(name for name in sent if name not in of_both),
        extra=() if is_part else tuple(extra),
        misshapen=tuple(
            f"{name} is {shape}, not {sent[name]}" for name, shape in of_both.items() if shape != sent[name]
        ),
    )
