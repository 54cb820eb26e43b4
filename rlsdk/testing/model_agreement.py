"""Check that engine and learner agree on the logprobs of the same tokens: `rlsdk check model`, given weights.

To find the first difference, the same tokens run through both, module by module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from rlsdk.contracts import ActorSpec, DType, ExaminesModel, Model, TrainBatch
from rlsdk.conversion import read_header, without_weights
from rlsdk.engines.canary import TOLERANCE, allowed_outliers
from rlsdk.errors import ArgumentError, ConfigError, RlsdkError, first_line
from rlsdk.learners.rows import to_exact_row
from rlsdk.plugins import Plugins
from rlsdk.readiness.tasks import not_embedded
from rlsdk.testing.model_check import ModelProperty
from rlsdk.testing.model_subject import ModelSubject
from rlsdk.testing.samples import conversations

NAME = "logprobs"
ENGINE = "transformers"
LENGTH = 64
"""Maximum sequence length; one token less is compared, since vLLM needs room for another one."""
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def agreement(
    subject: ModelSubject,
    path: str,
    *,
    engine: str = ENGINE,
    trust_remote_code: bool = False,
    plugins: Plugins | None = None,
) -> ModelProperty:
    """Check that engine and learner agree on logprobs, within the tolerance of a run's canary.

    Args:
        subject: Tokenizer and configuration of the model.
        path: Folder of the model.
        engine: Name of an engine.
        trust_remote_code: Run code shipped with the model.
        plugins: Where the engine is looked up; None for the installed plugins.
    """
    if not has_weights(path):
        return ModelProperty(NAME, "n/a", f"{path!r} is not a folder with weights ({', '.join(_WEIGHTS)})")
    if subject.config.get("quantization_config"):
        return ModelProperty(NAME, False, "config.json has a quantization_config, and a learner trains plain weights")
    model, tokens = _model(subject, path, trust_remote_code), sample_tokens(subject)
    if wrong := not_embedded(subject.codec, tokens, subject.text_config.get("vocab_size", sys.maxsize)):
        return ModelProperty(NAME, False, f"a text has {wrong}")
    try:
        read_header(path)
        with started(engine, model, plugins) as running:
            gaps = np.abs(running.logprobs(tokens) - _learned(open_policy(model), tokens))
    except (RlsdkError, ImportError) as error:
        return ModelProperty(NAME, False, f"engine {engine!r}: {error}")
    except Exception as error:  # noqa: BLE001 - transformers raises anything for files that it cannot use
        remedy = "; read that code, and give --trust-remote-code if you trust it"
        code = remedy if "trust_remote_code" in str(error) else ""
        return ModelProperty(NAME, False, f"engine {engine!r}: {type(error).__name__}: {first_line(error)}{code}")
    gaps, tolerance = np.nan_to_num(gaps, nan=np.inf), TOLERANCE[model.dtype]
    worst, at = float(gaps.max()), int(gaps.argmax()) + 1
    if np.mean(gaps > tolerance) <= allowed_outliers(model) and worst < np.inf:
        return ModelProperty(NAME, True)
    return ModelProperty(
        NAME,
        False,
        f"engine {engine!r} and the learner differ by {worst:.2g} nats at token {at} of {len(tokens)}, "
        f"{subject.codec.shown(tokens[at : at + 1])!r} (tolerance {tolerance:g} in {model.dtype}); --trace finds the "
        "operation that differs",
    )


def traced(subject: ModelSubject, path: str, trust_remote_code: bool = False) -> list[Any]:
    """Compare engine `transformers` and learner module by module; see `trace`.

    Raises:
        ConfigError: The folder has no weights.
    """
    if not has_weights(path):
        raise ArgumentError([f"--trace runs the model, but {path!r} is not a folder with weights"])
    model = _model(subject, path, trust_remote_code, exact=True)
    with started(ENGINE, model) as engine:
        return trace(engine, open_policy(model), sample_tokens(subject), model.max_length)


def has_weights(path: str) -> bool:
    """True if a path is a folder with a model's weights."""
    return any(next(Path(path).glob(pattern), None) is not None for pattern in _WEIGHTS)


def sample_tokens(subject: ModelSubject) -> np.ndarray:
    """Return tokens of conversations, as text, int64 `[k]` with `k` below `LENGTH`."""
    text = "\n".join(m.text for each in conversations(8, 0) for m in each)
    return subject.codec.encode(text)[: _length(subject) - 1]


def _length(subject: ModelSubject) -> int:
    return min(LENGTH, int(subject.text_config.get("max_position_embeddings") or LENGTH))


@contextmanager
def started(name: str, model: Model, plugins: Plugins | None = None) -> Iterator[Any]:
    """Run an engine in this process.

    Raises:
        RlsdkError: There is no such engine, or it cannot run the model.
    """
    plugins = plugins or Plugins()
    engine = plugins.resolve(plugins.reference("engine", name))
    if isinstance(engine, ExaminesModel) and (faults := engine.model_faults(without_weights(model))):
        raise ConfigError(faults)
    place = ActorSpec(role="engine", threads=int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    os.environ.update(engine.environment(place))
    engine.start(model, place)
    try:
        yield engine
    finally:
        engine.stop()


def open_policy(model: Model) -> Any:
    """Load the learner's model, with the default attention of the engine `transformers`.

    Raises:
        LearnerError: The model cannot be trained.
    """
    from rlsdk.learners.model import load_policy

    return load_policy(model, "sdpa" if without_weights(model)._supports_sdpa else "eager", False).eval()


def _learned(policy: Any, tokens: np.ndarray) -> np.ndarray:
    from rlsdk.learners.rows import to_rows

    with torch.no_grad():
        return np.asarray(policy(to_rows(whole_rollout(tokens), "padded"))[0].float().numpy())


def _model(subject: ModelSubject, path: str, trust_remote_code: bool, *, exact: bool = False) -> Model:
    named = subject.config.get("dtype") or subject.config.get("torch_dtype")
    dtype: Any = named if named in get_args(DType) else "float32"
    return Model(path=path, dtype=dtype, max_length=_length(subject), trust_remote_code=trust_remote_code, exact=exact)


LOGPROBS = "logprobs"
"""Name of the last operation: token logprobs at temperature 1."""


@attrs.frozen
class Operation:
    """An operation of a model, compared between engine and learner.

    Attributes:
        name: Name of the module, such as `model.layers.0.self_attn.q_proj`, with `input of` before it if the difference
            arose between two modules, as in attention before `o_proj`.
        difference: Maximum absolute difference of the outputs; infinite if the shapes differ or a number is not finite
            on only one side.
        dtype: Dtype of the output; `ENGINE / LEARNER` if they differ.
        shape: Shape of the learner's output.
    """

    name: str
    difference: float
    dtype: str
    shape: tuple[int, ...]

    @property
    def differs(self) -> bool:
        """True if the two outputs differ in numbers or dtype."""
        return self.difference > 0 or "/" in self.dtype


def trace(engine: Any, policy: Any, token_ids: np.ndarray, width: int) -> list[Operation]:
    """Run the same tokens through both sides, and compare the outputs of all modules in execution order.

    Args:
        engine: The engine `transformers`, started with `Model.exact`.
        policy: The learner's `PolicyModel` of the same model.
        token_ids: int64 `[k]`, at least two and at most `width`.
        width: `max_length` with which the engine was started.

    Returns:
        Operations in the engine's execution order, `logprobs` last.
    """
    with _outputs(engine.net) as ours:
        sampled = engine.logprobs(token_ids)
    with _outputs(policy.model) as theirs, torch.no_grad():
        learned = policy(to_exact_row(whole_rollout(token_ids), width))[0]
    known = [name for name in ours if name in theirs]
    operations = [_compared(name, ours[name], theirs[name]) for name in known]
    return [*operations, _compared(LOGPROBS, (torch.from_numpy(sampled),), (learned,))]


def first_difference(operations: Sequence[Operation]) -> Operation | None:
    """Return the first operation that differs, in execution order; None if all agree.

    A module finishes after its submodules, so this finds the innermost one.
    """
    return next((each for each in operations if each.differs), None)


def pick(operations: Sequence[Operation], around: int = 3) -> list[Operation]:
    """Select operations to show: a few around the first difference, and the logprobs."""
    first = next((i for i, each in enumerate(operations) if each.differs), None)
    if first is None:
        return list(operations[-1:])
    shown = list(operations[max(0, first - around) : first + around + 1])
    return shown if operations[-1] in shown else [*shown, operations[-1]]


@contextmanager
def _outputs(net: nn.Module) -> Iterator[dict[str, tuple[Tensor, ...]]]:
    """Collect inputs of the innermost modules and outputs of all modules, by name, in execution order."""
    found: dict[str, tuple[Tensor, ...]] = {}
    head = net.get_output_embeddings()  # type: ignore[operator]

    def keep(name: str, values: Any) -> None:
        found[name] = tuple(tensor.detach().clone() for tensor in _tensors(values))

    def watch(name: str, module: nn.Module) -> Iterator[Any]:
        if not any(module.children()):
            yield module.register_forward_pre_hook(
                lambda _, args, options: keep(f"input of {name}", (args, options)), with_kwargs=True
            )
        yield module.register_forward_hook(lambda _, __, output: keep(name, output))

    with ExitStack() as stack:
        for name, module in net.named_modules():
            if name and module is not head:  # the learner's head returns no logits
                for handle in watch(name, module):
                    stack.callback(handle.remove)
        yield found


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from (tensor for each in output.values() for tensor in _tensors(each))
    elif isinstance(output, tuple | list):
        yield from (tensor for each in output for tensor in _tensors(each))


def _compared(name: str, ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> Operation:
    kinds = [" ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in side)) for side in (ours, theirs)]
    dtype = kinds[0] if kinds[0] == kinds[1] else " / ".join(kinds)
    shape = tuple(theirs[0].shape) if theirs else ()
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return Operation(name, float("inf"), dtype, shape)
    gaps = [_gap(one.double(), other.double()) for one, other in zip(ours, theirs, strict=True)]
    return Operation(name, max(gaps, default=0.0), dtype, shape)


def _gap(one: Tensor, other: Tensor) -> float:
    apart = torch.where(one == other, 0.0, (one - other).abs())
    apart = torch.where(one.isnan() & other.isnan(), 0.0, apart).nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(apart.max()) if apart.numel() else 0.0


def whole_rollout(token_ids: np.ndarray) -> TrainBatch:
    """Return a batch of one rollout; all tokens except the first are response tokens."""
    length = np.array([len(token_ids)], np.int64)
    return TrainBatch(
        token_ids=np.asarray(token_ids, np.int64),
        lengths=length,
        starts=np.ones(1, np.int64),
        responses=length - 1,
        loss_mask=np.ones(len(token_ids) - 1, bool),
    )
