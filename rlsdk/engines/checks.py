"""Checks of what an engine receives and returns, and the output head that tied models leave out."""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from rlsdk.contracts import Completion, Finish, Request, Weights
from rlsdk.contracts.generation import MAX_TOP_LOGPROBS
from rlsdk.errors import EngineError, ValueFault
from rlsdk.vision import Vision
from rlsdk.weights import TIED_HEAD

_FINISHES = get_args(Finish)
_INPUT_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


def outside(token_ids: np.ndarray, vocabulary: int) -> int | None:
    """Return a token id that the model has no embedding for; None if there is none."""
    if not len(token_ids):
        return None
    least, greatest = int(token_ids.min()), int(token_ids.max())
    return least if least < 0 else greatest if greatest >= vocabulary else None


def known_ids(vocabulary: int) -> str:
    """Return which token ids a model reads, for messages."""
    return f"the model has 0 to {vocabulary - 1}" if vocabulary < sys.maxsize else "expected ids from 0"


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


def completion_fault(completion: Completion, request: Request, version: int, vocabulary: int) -> str:
    """Return what is wrong with a completion, with what was expected; empty if nothing is.

    The engine waits meanwhile, so a correct completion takes few calls of numpy: not even a search for infinite values.

    Args:
        completion: Completion that an engine returned.
        request: Its request.
        version: Version of the weights that the engine has; no token can come from a later one.
        vocabulary: Number of tokens that the model has embeddings for.
    """
    if completion.finish not in _FINISHES:
        return f"finish {reprlib.repr(completion.finish)}; expected one of {', '.join(_FINISHES)}"
    tokens, logprobs, versions = completion.token_ids, completion.logprobs, completion.versions
    if not _is_array(tokens, "iu"):
        return f"token_ids {_told(tokens)}; expected an array of integers with one axis"
    length = len(tokens)
    if not (_is_array(logprobs, "f") and len(logprobs) == length):
        return f"logprobs {_told(logprobs)} for {length} tokens; expected an array of {length} floats"
    if not (_is_array(versions, "iu") and len(versions) == length):
        return f"versions {_told(versions)} for {length} tokens; expected an array of {length} integers"
    return _value_fault(completion, request, version, vocabulary) if length else ""


def _value_fault(completion: Completion, request: Request, version: int, vocabulary: int) -> str:
    tokens, logprobs, versions = completion.token_ids, completion.logprobs, completion.versions
    if (length := len(tokens)) > request.sampling.max_tokens:
        return f"{length} tokens; its request allows {request.sampling.max_tokens}"
    if (wrong_id := outside(tokens, vocabulary)) is not None:
        return f"token id {wrong_id}; {known_ids(vocabulary)}"
    if not math.isfinite(np.add.reduce(logprobs)) and not np.isfinite(logprobs).all():
        at = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        return (
            f"logprob {logprobs[at]} for token {at}; expected a finite logprob of each sampled token, under the "
            "distribution that it was sampled from"
        )
    if int(versions.min()) < 0 or int(versions.max()) > version:
        wrong = next(int(v) for v in versions if not 0 <= v <= version)
        return f"version {wrong} for a token; expected the version of the weights that sampled it, 0 to {version}"
    return ""


def _is_array(values: Any, kinds: str) -> bool:
    return isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in kinds


def _told(values: Any) -> str:
    if isinstance(values, np.ndarray):
        return f"of dtype {values.dtype} and shape {list(values.shape)}"
    return f"of type {type(values).__name__}"


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
