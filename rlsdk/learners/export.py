"""Export the actor as weights for engines, and as a folder that `transformers.from_pretrained` opens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from rlsdk.contracts import Model, Weights
from rlsdk.conversion import aliases, by_layer, to_checkpoint
from rlsdk.learners.lora import Lora, is_adapter, merged, peft_names, write_adapter
from rlsdk.learners.ranks import Ranks
from rlsdk.vision import Vision, sees
from rlsdk.weights import joined, to_weights

if TYPE_CHECKING:
    from torch import Tensor

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_OWN_TOKENIZER = ("*.py", "*.tiktoken", "tiktoken.model")
"""Further files of a tokenizer that comes with its own code."""


@attrs.frozen
class WeightExporter:
    """Gather the actor's tensors on rank 0; every method is a collective, called on all ranks.

    Attributes:
        model: The transformers model without the wrapper that shards it.
        source: Origin of the model.
        ranks: Ranks that hold its shards.
        lora: Its LoRA settings, if any.
        gather: Returns full tensors, as `TrainedModule.full_tensors` does.
        dropouts: Rates of dropout in the model's own config, by part and name; the learner trains without any.
    """

    model: Any
    source: Model
    ranks: Ranks
    lora: Lora | None
    gather: Callable[..., dict[str, Tensor]]
    dropouts: Mapping[tuple[str, str], float] = attrs.field(factory=dict)

    def weights(self, version: int) -> Weights | None:
        """Return all tensors as `save_pretrained` would write them, with an adapter merged; gathered layer by layer."""
        return joined(self.parts(version))

    def parts(
        self, version: int, *, copy: bool = True, host: bool = True, each_rank: bool = False
    ) -> Iterator[Weights | None]:
        """Yield the tensors of `weights` layer by layer (rank 0; None elsewhere).

        Args:
            version: Version of the weights.
            copy: True if the arrays must own their memory; otherwise they may be the model's own.
            host: False for torch tensors on their device, which may be the model's own.
            each_rank: True to yield the tensors on every rank.
        """
        keep = each_rank or self.ranks.rank == 0
        left_out = aliases(self.model)
        for names in by_layer(name for name in self.model.state_dict() if name not in left_out):
            tensors = self._whole(self.gather(keep=keep, wanted=names.__contains__, host=host))
            if keep:
                yield to_weights(version, to_checkpoint(self.model, tensors), copy=copy, host=host)
            else:
                yield None

    def adapter_weights(self, version: int) -> Weights | None:
        """Return the adapter's tensors under the names of peft's files."""
        assert self.lora is not None
        tensors = self.gather(keep=self.ranks.rank == 0, wanted=is_adapter)
        weights = to_weights(version, peft_names(tensors))
        return attrs.evolve(weights, adapter=self.lora.adapter) if self.ranks.rank == 0 else None

    def export(self, folder: Path) -> None:
        """Write weights (safetensors), config and tokenizer; adapters are merged, and also saved in `adapter`."""
        tensors = self.gather(keep=self.ranks.rank == 0)
        if self.ranks.rank == 0:
            write_model(folder, self.model, self._whole(tensors), self.source, self.dropouts)
            if self.lora is not None:
                write_adapter(folder / "adapter", self.model, tensors, self.source)
            for file in folder.rglob("*.safetensors"):  # safetensors 0.8 makes its files readable only by their owner
                shutil.copymode(folder / "config.json", file)
        self.ranks.gather(None)

    def _whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors if self.lora is None else merged(tensors, self.lora)


def write_model(
    folder: Path,
    model: Any,
    tensors: Mapping[str, Tensor],
    source: Model,
    dropouts: Mapping[tuple[str, str], float] | None = None,
) -> None:
    """Write config, generation config, weights (safetensors) and tokenizer.

    Args:
        folder: Target folder, created if missing.
        model: The transformers model, for its config.
        tensors: All its tensors, gathered.
        source: Path or hub id of the original model.
        dropouts: Rates of dropout for the config, by part and name; default: the model's.
    """
    from rlsdk.learners.model import with_dropouts

    folder.mkdir(parents=True, exist_ok=True)
    _save(folder, model, tensors)
    config = with_dropouts(model.config, dropouts or {})
    config.dtype = source.dtype  # the parameters' dtype may be wider than the compute dtype
    config.save_pretrained(folder)
    copy_tokenizer(source.tokenizer or source.path, folder, trust_remote_code=source.trust_remote_code)
    vision = Vision(source)
    if sees(model) and vision.usable:
        vision.save(folder)
    if source.chat_template is not None:
        write_template(folder, source.chat_template)


def _save(folder: Path, model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write config, generation config and weights.

    transformers reads generation configs that it refuses to save, such as the many that name a temperature without
    `do_sample: true`; so it saves an empty one, which is then replaced.
    """
    generation = getattr(model, "generation_config", None)  # None for a model that transformers cannot sample from
    if generation is None:
        model.save_pretrained(folder, state_dict=dict(tensors))
        return
    model.generation_config = type(generation)()
    try:
        model.save_pretrained(folder, state_dict=dict(tensors))
    finally:
        model.generation_config = generation
    generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


def copy_tokenizer(source: str, folder: Path, *, trust_remote_code: bool) -> None:
    """Copy a tokenizer's files unchanged; a tokenizer given by hub id is loaded and saved.

    Loading and saving may change a tokenizer silently, since transformers rebuilds some tokenizers.
    """
    if not Path(source).is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code).save_pretrained(folder)
        return
    for pattern in (*_TOKENIZER_FILES, *(_OWN_TOKENIZER if trust_remote_code else ())):
        for file in Path(source).glob(pattern):
            shutil.copyfile(file, folder / file.name)


def write_template(folder: Path, template: str) -> None:
    """Replace the chat template of a tokenizer's folder, in each of the files that may hold one."""
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)
    for name in ("tokenizer_config.json", "processor_config.json"):
        file = folder / name
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if config.pop("chat_template", None) is not None:
            file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
