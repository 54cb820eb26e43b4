"""Tinker's data as batches of rlsdk, and logprobs as Tinker's outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from tinker.proto import tinker_public_pb2 as messages

from rlsdk.contracts import TrainBatch
from rlsdk_tinker.losses import LOSSES, TokenLoss

_DTYPES: Mapping[int, type[Any]] = {messages.DTYPE_FLOAT32: np.float32, messages.DTYPE_INT64: np.int64}


class RequestError(Exception):
    """A request that cannot be met; the message goes to the client."""


@attrs.frozen(eq=False)
class Data:
    """The data of one request, `n` sequences with `t` target tokens in all.

    Attributes:
        batch: The sequences; the first token of each is its prompt.
        inputs: Inputs of the loss, float64 `[t]` each.
        loss: Name of the loss.
        options: Options of the loss.
    """

    batch: TrainBatch
    inputs: Mapping[str, np.ndarray]
    loss: str
    options: Mapping[str, float]

    @classmethod
    def of(cls, request: Any, *, longest: int, vocabulary: int) -> Data:
        """Read a `ForwardBackwardRequest`.

        Args:
            request: The protobuf message.
            longest: Maximum number of tokens of a sequence, its last target included.
            vocabulary: Number of tokens that the model knows.

        Raises:
            RequestError: A datum or an option is not as the loss expects it.
        """
        if request.loss_fn not in LOSSES:
            raise RequestError(f"unknown loss_fn {request.loss_fn!r}; this server has {', '.join(LOSSES)}")
        loss = LOSSES[request.loss_fn]
        given = {name: value.number for name, value in request.loss_fn_config_v2.items()} or dict(
            request.loss_fn_config
        )
        if unknown := sorted(given.keys() - loss.options.keys()):
            expected = ", ".join(loss.options) or "no options"
            raise RequestError(f"loss_fn {request.loss_fn!r} got the option {unknown[0]!r}; it has {expected}")
        sequences, columns = [], {name: list[np.ndarray]() for name in loss.inputs}
        for i, datum in enumerate(request.data):
            where = f"datum {i}"
            if unknown := sorted(datum.loss_fn_inputs.keys() - {"target_tokens", *loss.inputs}):
                raise RequestError(
                    f"{where}: loss_fn {request.loss_fn!r} reads target_tokens, {', '.join(loss.inputs)}; got "
                    f"{unknown[0]!r}, too"
                )
            sequences.append(_sequence(datum, longest, vocabulary, where))
            for name, column in columns.items():
                column.append(_array(datum, name, len(sequences[-1]) - 1, where).astype(np.float64))
        inputs = {name: np.concatenate(column) for name, column in columns.items()} if sequences else {}
        return cls(batch_of(sequences), inputs, request.loss_fn, {**loss.options, **given})

    def token_loss(self, logprobs: np.ndarray) -> TokenLoss:
        """Compute the loss from the current logprobs, `[t]`."""
        return LOSSES[self.loss].compute(logprobs.astype(np.float64), self.inputs, self.options)

    def weighted(self, logprobs: np.ndarray, weights: np.ndarray) -> TrainBatch:
        """Return the batch with the weights, `[t]`, of the loss `-weights · logprobs`; zeros are not trained on."""
        now = logprobs.astype(np.float32)
        batch = attrs.evolve(self.batch, loss_mask=weights != 0)
        return batch.with_tokens(advantages=weights.astype(np.float32), old_logprobs=now, behaviour_logprobs=now)


def batch_of(sequences: Sequence[np.ndarray]) -> TrainBatch:
    """Pack token ids, int64, at least two in each; all but the first of each are targets."""
    lengths = np.array([len(each) for each in sequences], np.int64)
    return TrainBatch(
        token_ids=np.concatenate([np.zeros(0, np.int64), *sequences]),
        lengths=lengths,
        starts=np.ones_like(lengths),
        responses=lengths - 1,
        loss_mask=np.ones(int((lengths - 1).sum()), bool),
    )


def prompt_of(chunks: Iterable[Any]) -> np.ndarray:
    """Return the token ids of a prompt in JSON, int64.

    Raises:
        RequestError: It has other parts than tokens, or none.
    """
    tokens: list[int] = []
    for chunk in chunks:
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise RequestError(f"the prompt has a part of type {chunk['type']!r}; this server reads encoded_text alone")
        tokens += chunk["tokens"]
    if not tokens:
        raise RequestError("the prompt is empty")
    return np.array(tokens, np.int64)


def output(batch: TrainBatch, logprobs: np.ndarray, metrics: Mapping[str, float]) -> bytes:
    """Return a `ForwardBackwardOutput` with the logprobs of each sequence's targets, `[t]`."""
    ends = np.append(0, np.cumsum(batch.responses)).astype(np.int64)
    record = messages.ArrayRecord(type_tag="ArrayRecord", num_datums=len(batch))
    values = logprobs.astype(np.float32)
    record.fields["logprobs"].CopyFrom(
        messages.BatchedTensor(
            data=values.tobytes(), offsets=(ends * values.itemsize).tobytes(), dtype=messages.DTYPE_FLOAT32
        )
    )
    found = messages.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=dict(metrics)
    )
    return bytes(found.SerializeToString())


def _sequence(datum: Any, longest: int, vocabulary: int, where: str) -> np.ndarray:
    """Return the tokens of a datum followed by its last target, int64."""
    parts = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") not in {"encoded_text", None}:
            raise RequestError(f"{where}: model_input has a part other than encoded text; this server reads text alone")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, np.int32).astype(np.int64))
    tokens = np.concatenate([np.zeros(0, np.int64), *parts])
    if not len(tokens):
        raise RequestError(f"{where}: model_input is empty")
    targets = _array(datum, "target_tokens", len(tokens), where).astype(np.int64)
    if not np.array_equal(tokens[1:], targets[:-1]):
        at = int(np.flatnonzero(tokens[1:] != targets[:-1])[0])
        raise RequestError(
            f"{where}: target {at} is {targets[at]}, but the next token of model_input is {tokens[at + 1]}; this "
            "server expects the targets of next-token prediction, model_input shifted by one"
        )
    if len(tokens) >= longest:
        raise RequestError(
            f"{where}: {len(tokens) + 1} tokens with the last target; the server's model.max_length is {longest}"
        )
    sequence = np.append(tokens, targets[-1])
    if len(wrong := sequence[(sequence < 0) | (sequence >= vocabulary)]):
        raise RequestError(f"{where}: the model has no token {wrong[0]}; it has {vocabulary} tokens")
    return sequence


def _array(datum: Any, name: str, length: int, where: str) -> np.ndarray:
    """Return an input of a datum's loss, `[length]`."""
    if name not in datum.loss_fn_inputs:
        raise RequestError(f"{where}: loss_fn_inputs lacks {name!r}; it has {', '.join(sorted(datum.loss_fn_inputs))}")
    tensor = datum.loss_fn_inputs[name]
    if tensor.WhichOneof("encoding") == "sparse_csr" or len(tensor.shape) > 1:
        raise RequestError(f"{where}: {name} has several values for each token; this server reads one")
    values: np.ndarray = np.frombuffer(tensor.dense, _DTYPES.get(tensor.dtype, np.float32))
    if len(values) != length:
        raise RequestError(f"{where}: {name} has {len(values)} values for {length} tokens of model_input")
    if not np.isfinite(values).all():
        raise RequestError(f"{where}: {name} has values that are not finite")
    return values
