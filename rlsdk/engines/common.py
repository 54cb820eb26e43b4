"""Shared parts of the engines: seeds, checks of requests and weights, end tokens, stop strings, continuations."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rlsdk.contracts import Completion, Finish, Model, Request, Sampled, TopTokens, Weights
from rlsdk.contracts.generation import MAX_TOP_LOGPROBS
from rlsdk.errors import EngineError, ValueFault, first_line
from rlsdk.vision import Vision
from rlsdk.weights import TIED_HEAD

if TYPE_CHECKING:
    from collections.abc import Mapping

_MASK = (1 << 64) - 1
_INPUT_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


def mix(*numbers: int) -> int:
    """Hash numbers to a pseudo-random 63-bit number, equal in every process (SplitMix64 over each number in turn)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def positions(config: Any) -> float:
    """Return the maximum number of tokens that a model supports; infinity if its config has no limit.

    Includes the scaling factor of rotary positions, unless `max_position_embeddings` already does.

    Args:
        config: transformers config of the language model.
    """
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
    named = [found for name in names if (found := getattr(config, name, None))]
    longest = float(min(named, default=math.inf))
    for each in _rotary(config):
        factor = each.get("factor") or 1.0
        if each.get("rope_type") in ("linear", "dynamic"):
            return longest * factor
        if "original_max_position_embeddings" in each:
            longest = max(longest, each["original_max_position_embeddings"] * factor)
    return longest


def constant_positions(config: Any) -> float:
    """Return the number of tokens up to which rotary frequencies are constant; infinity if they never change.

    Beyond it, transformers changes those of all tokens of a batch, by its longest sequence.

    Args:
        config: transformers config of the language model.
    """
    limits = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
    found = [
        each.get(name) or getattr(config, name, None)
        for each in _rotary(config)
        if (name := limits.get(each.get("rope_type", "")))
    ]
    return float(min(filter(None, found), default=math.inf))


def _rotary(config: Any) -> list[Mapping[str, Any]]:
    """Return the settings of rotary positions: one for all layers, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, dict)]


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


def open_tokenizer(model: Model) -> Any:
    """Return the tokenizer of a model, with its chat template replaced if the model names another."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.tokenizer or model.path, trust_remote_code=model.trust_remote_code)
    if model.chat_template is not None:
        tokenizer.chat_template = model.chat_template
    return tokenizer


def end_ids(model: Model, tokenizer: Any) -> tuple[int, ...]:
    """Return the end tokens: the tokenizer's, those of the generation config, and those of the model's config.

    Raises:
        ValueFault: The generation config in the model's folder is damaged.
    """
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    found = {tokenizer.eos_token_id, *_listed(getattr(config, "eos_token_id", None))}
    try:
        found.update(_listed(GenerationConfig.from_pretrained(model.path).eos_token_id))
    except (OSError, TypeError, ValueError) as error:
        file = Path(model.path) / "generation_config.json"
        if file.is_file():
            raise ValueFault(
                f"{file} cannot be read ({first_line(error)}), and may name tokens that end an answer; copy it again"
            ) from error
        if not isinstance(error, OSError):  # of the hub; the file is optional
            raise
    return tuple(sorted(i for i in found if i is not None))


def _listed(ids: int | Sequence[int] | None) -> Sequence[int]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else ids


class StopStrings:
    """Watch one continuation for stop strings."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        """Watch for the given stop strings.

        Args:
            tokenizer: The model's tokenizer.
            stops: Stop strings; one may lie within a token or span several.
        """
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._reach = max(map(len, stops)) - 1
        self._tail = ""
        self._ids: list[int] = []
        self._text = 0
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            from tokenizers.decoders import DecodeStream

            # Special tokens are read too: `</answer>` may be one.
            self._stream = DecodeStream(skip_special_tokens=False)

    @classmethod
    def of(cls, request: Request, tokenizer: Any) -> StopStrings | None:
        """Build the watcher of a request, fed with any answer already begun; None if it has no stop strings."""
        sampling = request.sampling
        if not sampling.stop or sampling.ignore_eos:
            return None
        watch = cls(tokenizer, sampling.stop)
        for token in request.prompt_ids[len(request.prompt_ids) - request.begun :].tolist():
            watch.feed(token)
        return watch

    def feed(self, token: int) -> bool:
        """Append a token; return True if the text now contains a stop string."""
        window = self._tail + self._decode(token)
        self._tail = window[max(0, len(window) - self._reach) :]
        return any(stop in window for stop in self._stops)

    def _decode(self, token: int) -> str:
        """Return the text that this token adds; empty if it is only part of a character."""
        if self._backend is not None:
            return self._stream.step(self._backend, token) or ""
        self._ids.append(token)
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        if text.endswith("\ufffd"):
            return ""
        new, self._text = text[self._text :], len(text)
        return new


@attrs.define(eq=False)
class Continuation:
    """A running continuation: its sampled tokens and the weight versions that produced them.

    Attributes:
        request: Request id.
        index: Index among the request's continuations.
        token_ids: Tokens sampled so far.
        logprobs: Logprobs of these tokens.
        spans: Pairs (first token, weight version used from that token on).
        stops: Stop-string watcher, if there are stop strings.
        likeliest: Number of top tokens to record for each sampled token.
        top: The recorded top tokens, as (ids, logprobs).
        routing: Experts of successive tokens, arrays `[tokens, layers, k]`, starting with the prompt's first token.
        prompt: Number of prompt tokens.
    """

    request: str
    index: int
    stops: StopStrings | None = None
    likeliest: int = 0
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    spans: list[tuple[int, int]] = attrs.field(factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = attrs.field(factory=list)
    routing: list[np.ndarray] = attrs.field(factory=list)
    prompt: int = 0

    @classmethod
    def of(cls, request: Request, index: int, tokenizer: Any) -> Continuation:
        """Create a continuation with no tokens sampled yet."""
        stops = StopStrings.of(request, tokenizer)
        return cls(request.id, index, stops, request.sampling.top_logprobs, prompt=len(request.prompt_ids))

    def stamp(self, version: int) -> None:
        """Record that the following tokens are sampled by weights of this version."""
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append((len(self.token_ids), version))

    def record(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[tuple[np.ndarray, np.ndarray]] = ()
    ) -> bool:
        """Append sampled tokens; return whether a stop string ends them (tokens after the stop string are dropped)."""
        kept = len(tokens)
        stopped = False
        if self.stops is not None:
            for position, token in enumerate(tokens):
                if self.stops.feed(token):
                    kept, stopped = position + 1, True
                    break
        self.token_ids += tokens[:kept]
        self.logprobs += logprobs[:kept]
        self.top += top[:kept]
        return stopped

    def complete(self, finish: Finish) -> Completion:
        """Return the finished completion."""
        arrays = self._arrays(0)
        return Completion(
            request=self.request, index=self.index, finish=finish, routed_experts=self._routed(), **arrays
        )

    def _routed(self) -> np.ndarray | None:
        """Return the experts of all tokens but the last; -1 where the engine did not report them."""
        if not self.routing:
            return None
        reported = np.concatenate(self.routing)[: self.prompt + len(self.token_ids) - 1]
        missing = self.prompt + len(self.token_ids) - 1 - len(reported)
        return np.pad(reported.astype(np.int16), ((0, missing), (0, 0), (0, 0)), constant_values=-1)

    def since(self, start: int) -> Sampled:
        """Return the tokens from a position on, of a continuation that is still running."""
        return Sampled(request=self.request, index=self.index, start=start, **self._arrays(start))

    def _arrays(self, start: int) -> dict[str, Any]:
        versions = spread(self.spans, len(self.token_ids))
        return {
            "token_ids": np.asarray(self.token_ids[start:], dtype=np.int64),
            "logprobs": np.asarray(self.logprobs[start:], dtype=np.float32),
            "versions": versions[start:],
            "top": stack_top(self.top[start:]) if self.likeliest else None,
        }


def stack_top(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> TopTokens:
    """Join the most likely tokens of successive positions, each given as (ids, logprobs)."""
    if not rows:
        return TopTokens(np.zeros((0, 0), np.int64), np.zeros((0, 0), np.float32))
    ids, logprobs = zip(*rows, strict=True)
    return TopTokens(np.array(ids, np.int64), np.array(logprobs, np.float32))


def spread(spans: Sequence[tuple[int, int]], count: int) -> np.ndarray:
    """Return the version of each token, int64 `[count]`, from (first token, version) pairs in order."""
    versions = np.empty(count, dtype=np.int64)
    for start, version in spans:
        versions[start:] = version
    return versions


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
