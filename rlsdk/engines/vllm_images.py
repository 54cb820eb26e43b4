"""Images in vLLM: engine arguments and prompts for models that read images."""

from __future__ import annotations

from typing import Any

from rlsdk.contracts import Request
from rlsdk.vision import Vision

ARGUMENTS = {
    # vLLM creates the model's processor, which requires the tokenizer even for ids and pixels.
    "skip_tokenizer_init": False,
    "mm_processor_cache_gb": 0,
    "mm_device_do_normalize": False,  # the pixels are normalised already
}
"""Fields of vLLM's `EngineArgs` for a model that reads images."""


def prompt_with_images(request: Request, vision: Vision) -> Any:
    """Return vLLM's input for a prompt with images: the ids unchanged, and the same pixels as the learner reads.

    vLLM's own tokenisation and preprocessing of images might differ from the learner's.

    Args:
        request: Request with images; its prompt contains their tokens.
        vision: Image preprocessing of the model.
    """
    import torch
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    positions = [] if request.image_positions is None else request.image_positions.tolist()
    items, places = [], []
    begin = 0
    for image in request.images:
        given = dict(vision.pixels(image))
        patches = torch.tensor([len(given["pixel_values"])])
        if "image_grid_thw" not in given:  # Gemma 3
            given["num_patches"] = patches
        fields = {name: MultiModalFieldConfig.batched("image", keep_on_cpu=True) for name in given}
        fields["pixel_values"] = MultiModalFieldConfig.flat_from_sizes("image", patches)
        items += MultiModalKwargsItems.from_hf_inputs(given, fields)["image"]
        count = vision.count(image)
        places.append(PlaceholderRange(offset=positions[begin], length=count))
        begin += count
    hashes = [image.digest for image in request.images]
    return mm_input(
        request.prompt_ids.tolist(), MultiModalKwargsItems({"image": items}), {"image": hashes}, {"image": places}
    )
