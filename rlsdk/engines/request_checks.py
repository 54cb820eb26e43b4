"""Checks of requests before an engine admits any of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlsdk.contracts import Request
from rlsdk.contracts.generation import MAX_TOP_LOGPROBS
from rlsdk.errors import ValueFault
from rlsdk.vision import Vision


def check_requests(requests: Sequence[Request], *, max_length: int, vocabulary: int) -> None:
    """Refuse requests that an engine cannot generate, before any is admitted.

    Raises:
        ValueFault: A prompt is empty, too long or contains unknown token ids, or an option is out of range.
    """
    for request in requests:
        ids, sampling = request.prompt_ids, request.sampling
        problem = ""
        if len(ids) == 0:
            problem = "its prompt is empty"
        elif len(ids) >= max_length:
            problem = f"its prompt has {len(ids)} tokens, and model.max_length {max_length} must hold a response too"
        elif int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            least, greatest = int(ids.min()), int(ids.max())
            problem = f"its prompt has token ids from {least} to {greatest}; the model has 0 to {vocabulary - 1}"
        elif request.n < 1 or sampling.max_tokens < 1:
            problem = f"n and max_tokens must be at least 1; got n={request.n}, max_tokens={sampling.max_tokens}"
        elif sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            problem = (
                "temperature must be at least 0, top_p in (0, 1], top_k at least 0; "
                f"got {sampling.temperature}, {sampling.top_p}, {sampling.top_k}"
            )
        elif not 0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS:
            problem = f"top_logprobs must be 0 to {MAX_TOP_LOGPROBS}; got {sampling.top_logprobs}"
        if problem:
            raise ValueFault(f"request {request.id!r} cannot be generated: {problem}")


def check_images(requests: Sequence[Request], vision: Vision | None) -> None:
    """Refuse images that cannot be read, before any request is admitted.

    Args:
        requests: Requests to check.
        vision: Image processing of the model; None if it reads no images.

    Raises:
        ValueFault: The model or the engine reads no images, or a request's image tokens do not match its images.
        ConfigError: The model's image processor cannot be opened.
    """
    for request in requests:
        positions = () if request.image_positions is None else request.image_positions
        if not request.images and not len(positions):
            continue
        problem = ""
        if vision is None:
            problem = "it contains images, but this model, or the engine with these options, does not read images"
        elif len(positions) != (wanted := sum(map(vision.count, request.images))):
            problem = f"{len(positions)} of its tokens represent images, but its images need {wanted}"
        if problem:
            raise ValueFault(f"request {request.id!r} cannot be generated: {problem}")


def check_known(ids: Sequence[str], running: Iterable[str]) -> None:
    """Refuse request ids that are in use.

    Raises:
        ValueFault: An id occurs twice or is running.
    """
    taken = set(running)
    for name in ids:
        if name in taken:
            raise ValueFault(f"request id {name!r} is in use; ids are unique within a run")
        taken.add(name)
