"""Images as model input: the tokens that represent them, and the embeddings that replace these tokens.

A token represents part of an image because of its position, not its id: a policy may sample the id itself, which is
then text, in the engine as in the learner.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from rlsdk.contracts import Model
from rlsdk.errors import ConfigError, ValueFault
from rlsdk.messages import Image

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3")
"""Supported model types (`model_type` in config.json)."""
_BLANK = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAIAAAD9b0jDAAAAGUlEQVR42u3BMQEAAADCoPVPbQdvoAAAeA0JTAABY3ZqfQAAAABJRU5ErkJggg=="
)
"""A black PNG of 28 × 28 pixels."""
_KEPT = 256
"""Number of images whose pixels are cached, since a learner reads each image several times per step."""


def sees(net: Any) -> bool:
    """Return True for a transformers model that reads images; it may have no weights."""
    return net.config.model_type in TYPES and hasattr(net.base_model, "get_image_features")


def tower_names(net: Any) -> list[str]:
    """Return the names of the modules that read images, outside the language model; empty for a text model."""
    if not sees(net):
        return []
    children = (name for name, _ in net.base_model.named_children() if name != "language_model")
    return [f"{net.base_model_prefix}.{name}" for name in children]


def layout_faults(net: Any, options: Mapping[str, bool]) -> list[str]:
    """Report options that a vision-language model does not support; empty for any other model.

    Args:
        net: The model, possibly without weights.
        options: Reason with its remedy -> True if the option is set.
    """
    if not sees(net):
        return []
    kind = type(net).__name__
    return [f"a {kind} reads images, and {reason}" for reason, given in options.items() if given]


@attrs.define(eq=False)
class Vision:
    """Image processing of one model; its files are opened on the first image."""

    model: Model
    _pixels: dict[str, dict[str, Tensor]] = attrs.field(init=False, factory=dict, repr=False)
    _added: RemovableHandle | None = attrs.field(init=False, default=None, repr=False)

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.model.path, trust_remote_code=self.model.trust_remote_code)
        if config.model_type not in TYPES:
            raise ConfigError(
                [
                    f"a message contains an image, but the model {self.model.path!r} is of type {config.model_type!r}; "
                    f"rlsdk trains {', '.join(TYPES)} on images"
                ]
            )
        return config

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        try:
            # Use PIL, which is always installed; torchvision rounds differently.
            found = AutoImageProcessor.from_pretrained(self.model.path, backend="pil")
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                [f"the image processor (preprocessor_config.json) of {self.model.path!r} cannot be opened: {error}"]
            ) from error
        if getattr(found, "do_pan_and_scan", False):
            raise ConfigError(
                [f"{self.model.path!r}: do_pan_and_scan splits images, which is not supported; set it to false"]
            )
        return found

    @property
    def usable(self) -> bool:
        """True if the model can read images: its type is supported, and its folder has an image processor."""
        try:
            self.check()
        except ConfigError:
            return False
        return True

    def check(self) -> None:
        """Open the files needed for images.

        Raises:
            ConfigError: The model's type is unknown, or its image processor cannot be opened.
        """
        _ = self._config, self._processor

    def save(self, folder: Path) -> None:
        """Write the image processor's settings into an export."""
        self._processor.save_pretrained(folder)

    @property
    def token(self) -> int:
        """Id of the token that represents part of an image."""
        return int(self._config.image_token_id)

    def mark(self, tokenizer: Any) -> str:
        """Return the text that a chat template writes in place of an image."""
        config = self._config
        token = config.boi_token_index if config.model_type == "gemma3" else self.token
        return str(tokenizer.convert_ids_to_tokens(token))

    def expansion(self, image: Image, tokenizer: Any) -> str:
        """Return the text of the tokens that represent an image, as written by the transformers processor."""
        config = self._config
        tokens = str(tokenizer.convert_ids_to_tokens(self.token)) * self.count(image)
        if config.model_type != "gemma3":
            return tokens
        begin, end = tokenizer.convert_ids_to_tokens([config.boi_token_index, config.eoi_token_index])
        return f"\n\n{begin}{tokens}{end}\n\n"

    def count(self, image: Image) -> int:
        """Return the number of tokens that represent an image."""
        if self._config.model_type == "gemma3":
            return int(self._config.mm_tokens_per_image)
        patches = int(self.pixels(image)["image_grid_thw"].prod())
        return patches // int(self._config.vision_config.spatial_merge_size) ** 2

    def pixels(self, image: Image) -> dict[str, Tensor]:
        """Return the vision tower's inputs for an image: `pixel_values` and, for Qwen-VL models, `image_grid_thw`."""
        found = self._pixels.get(image.digest)
        if found is None:
            read = self._processor([image.open()], return_tensors="pt")
            found = {name: read[name] for name in ("pixel_values", "image_grid_thw") if name in read}
            while len(self._pixels) >= _KEPT:
                del self._pixels[next(iter(self._pixels))]
            self._pixels[image.digest] = found
        return found

    def within(self, images: Sequence[Image], tokens: int) -> tuple[Image, ...]:
        """Return the first images, as many as the given number of tokens represents.

        Raises:
            ValueFault: The tokens end within an image, or represent more images than there are.
        """
        left, taken = tokens, 0
        while left > 0 and taken < len(images):
            left -= self.count(images[taken])
            taken += 1
        if left:
            counts = [self.count(image) for image in images]
            raise ValueFault(f"{tokens} tokens represent images, but {len(images)} images have {counts} tokens")
        return tuple(images[:taken])

    def inputs(
        self,
        net: Any,
        input_ids: Tensor,
        image_mask: Tensor | None,
        images: Sequence[Sequence[Image]],
        attention_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return forward arguments for tokens and images, in place of `input_ids` and `position_ids`.

        They are for the next pass of this model: Qwen3-VL also gets features for its first layers (DeepStack), which
        its `forward` accepts only for ids, and which are therefore added on the way to its language model.

        The vision tower runs in every pass, on a blank image if there is none: ranks that share a model with ZeRO must
        execute the same operations.

        Args:
            net: The transformers model, with or without its head.
            input_ids: int64 `[rows, width]`.
            image_mask: bool `[rows, width]`, True for tokens that represent images; None if there are none.
            images: Images of each row; those beyond its tokens are ignored.
            attention_mask: `[rows, width]`, False for padding; None if there is no left padding.
        """
        import torch

        mask = torch.zeros_like(input_ids, dtype=torch.bool) if image_mask is None else image_mask
        counts = mask.sum(-1).tolist() if images else []
        seen = [image for row, count in zip(images, counts, strict=True) for image in self.within(row, int(count))]
        backbone = net.base_model
        embedded = backbone.get_input_embeddings()(input_ids)
        features, deep, grid = self._features(backbone, seen or [Image(_BLANK)])
        features = features.to(embedded.dtype)
        if self._added is not None:
            self._added.remove()  # in case the pass that it was meant for has failed
        if seen:
            embedded = embedded.masked_scatter(mask[..., None], features)
            if deep:
                self._add(backbone.language_model, visual_pos_masks=mask, deepstack_visual_embeds=deep)
        else:
            embedded = embedded + 0 * sum(each.sum() for each in (features, *deep))
        if net.config.model_type == "gemma3":
            # Tokens of one image attend to each other in both directions.
            return {"inputs_embeds": embedded, "token_type_ids": mask.long()}
        positions, _ = backbone.get_rope_index(
            input_ids,
            mm_token_type_ids=mask.int(),
            image_grid_thw=grid if seen else None,
            attention_mask=attention_mask,
        )
        return {"inputs_embeds": embedded, "position_ids": positions}

    def _add(self, module: Any, **more: Any) -> None:
        """Add arguments to the next forward pass of a module."""

        def add(_: Any, arguments: Any, given: dict[str, Any]) -> Any:
            added.remove()
            return arguments, {**given, **more}

        added = self._added = module.register_forward_pre_hook(add, with_kwargs=True)

    def _features(self, backbone: Any, images: Sequence[Image]) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Return the features of images, each `[tokens, d]`, and their grids `[images, 3]` if the tower needs them.

        The first features replace embeddings, the others are added to the states after the first layers.
        """
        import torch

        weight = backbone.get_input_embeddings().weight
        read = [self.pixels(image) for image in images]
        pixels = torch.cat([each["pixel_values"] for each in read]).to(weight.device, weight.dtype)
        if "image_grid_thw" not in read[0]:
            output = backbone.get_image_features(pixels, return_dict=True).pooler_output
            return output.reshape(-1, output.shape[-1]), [], None
        grid = torch.cat([each["image_grid_thw"] for each in read]).to(weight.device)
        output = backbone.get_image_features(pixels, grid, return_dict=True)
        deep = [torch.cat(layer) for layer in getattr(output, "deepstack_features", None) or ()]
        return torch.cat(output.pooler_output), deep, grid


def offsets(given: Mapping[str, torch.Tensor], lengths: torch.Tensor) -> torch.Tensor:
    """Return the offset from a row's next token index to its position, int64 `[rows]`.

    Args:
        given: Result of `Vision.inputs`.
        lengths: Number of tokens of each row, int64.
    """
    if "position_ids" not in given:
        return lengths * 0
    offset: torch.Tensor = given["position_ids"].amax((0, 2)) + 1 - lengths
    return offset
