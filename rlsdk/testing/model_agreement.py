"""Check that engine and learner agree on the logprobs of the same tokens: `rlsdk check model`, given weights.

Both run in this process, without Ray and DeepSpeed (which only updates weights).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np

from rlsdk.contracts import ActorSpec, DType, ExaminesModel, Model
from rlsdk.conversion import without_weights
from rlsdk.engines.canary import TOLERANCE, allowed_outliers
from rlsdk.errors import ConfigError, RlsdkError
from rlsdk.plugins import Plugins
from rlsdk.testing.model_check import ModelProperty
from rlsdk.testing.model_subject import ModelSubject
from rlsdk.testing.samples import conversations

NAME = "logprobs"
ENGINE = "transformers"
LENGTH = 64
"""Maximum sequence length; one token less is compared, since vLLM needs room for another one."""
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def agreement(
    subject: ModelSubject, path: str, *, engine: str = ENGINE, trust_remote_code: bool = False
) -> ModelProperty:
    """Check that engine and learner agree on logprobs, within the tolerance of a run's canary.

    Args:
        subject: Tokenizer and configuration of the model.
        path: Folder of the model.
        engine: Name of an engine.
        trust_remote_code: Run code shipped with the model.
    """
    if not has_weights(path):
        return ModelProperty(NAME, "n/a", f"{path!r} is not a folder with weights ({', '.join(_WEIGHTS)})")
    model = _model(subject, path, trust_remote_code)
    try:
        with started(engine, model) as running:
            policy, tokens = open_policy(model), sample_tokens(subject)
            gaps = np.abs(running.logprobs(tokens) - _learned(policy, tokens))
    except (RlsdkError, ImportError) as error:
        return ModelProperty(NAME, False, f"engine {engine!r}: {error}")
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
    """Compare engine `transformers` and learner module by module; see `model_trace.trace`.

    Raises:
        ConfigError: The folder has no weights.
    """
    from rlsdk.testing.model_trace import trace

    if not has_weights(path):
        raise ConfigError([f"--trace runs the model, but {path!r} is not a folder with weights"])
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
def started(name: str, model: Model) -> Iterator[Any]:
    """Run an engine in this process.

    Raises:
        RlsdkError: There is no such engine, or it cannot run the model.
    """
    plugins = Plugins()
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
    import torch

    from rlsdk.learners.rows import to_rows
    from rlsdk.testing.model_trace import whole_rollout

    with torch.no_grad():
        return np.asarray(policy(to_rows(whole_rollout(tokens), "padded"))[0].float().numpy())


def _model(subject: ModelSubject, path: str, trust_remote_code: bool, *, exact: bool = False) -> Model:
    named = subject.config.get("dtype") or subject.config.get("torch_dtype")
    dtype: Any = named if named in get_args(DType) else "float32"
    return Model(path=path, dtype=dtype, max_length=_length(subject), trust_remote_code=trust_remote_code, exact=exact)
