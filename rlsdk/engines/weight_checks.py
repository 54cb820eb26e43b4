"""Checks of the weights that an engine receives, and the output head that tied models leave out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from rlsdk.contracts import Weights
from rlsdk.errors import EngineError
from rlsdk.weights import TIED_HEAD

_INPUT_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


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
