"""Checks of the requests and weights that an engine receives, and the output head that tied models leave out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from rlsdk.contracts import Request, Weights
from rlsdk.contracts.generation import MAX_TOP_LOGPROBS
from rlsdk.engines.completion_checks import known_ids, outside
from rlsdk.errors import EngineError, ValueFault
from rlsdk.vision import Vision
from rlsdk.weights import TIED_HEAD

_INPUT_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


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
    check_prompts(requests, vocabulary)


def check_prompts(requests: Sequence[Request], vocabulary: int) -> None:
    """Refuse prompts with tokens that the model has no embeddings for, before any request is admitted.

    Raises:
        ValueFault: A prompt contains unknown token ids.
    """
    for request in requests:
        ids = request.prompt_ids
        if outside(ids, vocabulary) is not None:
            raise ValueFault(
                f"request {request.id!r} cannot be generated: its prompt has token ids from {ids.min()} to "
                f"{ids.max()}; {known_ids(vocabulary)}"
            )


def check_images(requests: Sequence[Request], vision: Vision | None) -> None:
    """Refuse images that cannot be read, before any request is admitted.

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


def with_tied_head(weights: Weights, tied: bool) -> Weights:
    """Return weights that also name the output head, if the model ties it to the input embeddings.

    Otherwise vLLM on the CPU would silently keep the old head, which it holds prepacked.

    Raises:
        EngineError: The model ties them, but no known name of the embeddings is present.
    """
    if not tied:
        return weights
    embeddings = next((n for n in weights.tensors if n.endswith(_INPUT_EMBEDDINGS)), None)
    if embeddings is None:
        known = ", ".join(f"*{n}" for n in _INPUT_EMBEDDINGS)
        raise EngineError(
            f"weights of version {weights.version}: the model ties its output head to the input embeddings, and none "
            f"of {known} is among the {len(weights.tensors)} tensors sent; send the embeddings"
        )
    if TIED_HEAD in weights.tensors:
        return weights
    return Weights(
        weights.version,
        {**weights.tensors, TIED_HEAD: weights.tensors[embeddings]},
        {**weights.dtypes, TIED_HEAD: weights.dtypes[embeddings]},
    )


def with_tied_heads(parts: Iterator[Weights], tied: bool) -> Iterator[Weights]:
    """Yield parts of weights that also name the output head, if the model ties it to the input embeddings."""
    for part in parts:
        yield with_tied_head(part, tied and any(name.endswith(_INPUT_EMBEDDINGS) for name in part.tensors))


def check_names(weights: Weights, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check that weights cover every tensor of a model.

    Args:
        weights: Received weights.
        expected: Shape of every tensor of the model, by name; additional tensors are accepted.

    Raises:
        EngineError: A tensor is missing or has a different shape; up to five of each are named.
    """
    _refuse(weights.version, expected, weights.tensors, _misshapen(weights, expected))


def checked(version: int, parts: Iterator[Weights], expected: Mapping[str, tuple[int, ...]]) -> Iterator[Weights]:
    """Yield parts of weights that fit the model, and check at the end that none is missing; see `check_names`."""
    came: set[str] = set()
    for part in parts:
        _refuse(version, {}, (), _misshapen(part, expected))
        came.update(part.tensors)
        yield part
    _refuse(version, expected, came, [])


def _misshapen(weights: Weights, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [
        f"{name} is {tuple(array.shape)}, not {tuple(expected[name])}"
        for name, array in weights.tensors.items()
        if name in expected and tuple(array.shape) != tuple(expected[name])
    ]


def _refuse(version: int, expected: Collection[str], came: Collection[str], wrong: Sequence[str]) -> None:
    missing = [name for name in expected if name not in came]
    if missing or wrong:
        parts = [f"{len(missing)} of {len(expected)} tensors are missing: {', '.join(missing[:5])}"] if missing else []
        parts += [f"{len(wrong)} have a different shape: {', '.join(wrong[:5])}"] if wrong else []
        raise EngineError(f"weights of version {version} do not fit the model: {'; '.join(parts)}")
