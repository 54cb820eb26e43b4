"""Algorithms: their fields with defaults, and the decorator that turns a class or keyword arguments into one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast, get_origin

import attrs

from rlsdk.components import OneOrMore, Use, component_of, mark, named
from rlsdk.errors import PluginError, nearest
from rlsdk.kinds import COMBINED, PART_LISTS, PARTS
from rlsdk.limits import NonNegative, Positive, Share
from rlsdk.options import CONVERTER, structure, unknown

_use = Use  # short name for the defaults below
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""Duplicated from `rlsdk.batch`, which imports torch, so that listing algorithms does not."""


@attrs.frozen(kw_only=True)
class Algorithm:
    """Defaults of an algorithm; a subclass marked `@rlsdk.algorithm("name")` overrides some.

    Attributes:
        advantage: Computes advantages from rewards.
        whiten_advantages: Normalise advantages to mean 0 and variance 1 over the sampled tokens of the batch.
        clip_advantages: Maximum absolute advantage, after whitening; null for no bound.
        top_entropy_quantile: Share of the sampled tokens of the batch, those of highest entropy before the update, that
            keep their advantage; it is 0 for the others. Null trains all (arXiv:2506.01939 recommends 0.2).
        policy_loss: Per-token loss.
        shaping: Shapings of the rewards before the advantage, in this order.
        correction: Weights for the mismatch between sampler and trainer; those of a list are multiplied.
        kl: Estimator of the KL term of the loss; used if `kl_coef` is above 0.
        kl_coef: Weight of the KL term of the loss.
        entropy_coef: Weight of the entropy bonus; `{target: ENTROPY}` adapts it to hold an entropy in nats per token.
        aggregate: How per-token losses are reduced to one number.
        norm: Length that `seq-mean-token-sum-norm` divides by; null uses `sampling.max_tokens`.
        filters: Filters that select the groups to train on.
        critic: True if a critic is trained.
        value_clip: Clip range of values around the old ones (PPO's clipped value loss); null for no clipping.
        rollouts: Sampled from the policy, the tasks' demonstrations, or mixed: both, with one demonstration per task.
        passing: Minimum reward of a right answer, for losses that read `preferred` but not pairs.
        defaults: Defaults for the run's other sections, by path: `{"rollout.dynamic_sampling": True}`. Values in a file
            or an override take precedence.
    """

    advantage: Use = _use("grpo")
    whiten_advantages: bool = False
    clip_advantages: Positive | None = None
    top_entropy_quantile: Share | None = None
    policy_loss: Use = _use("ppo")
    shaping: tuple[Use, ...] = ()
    correction: OneOrMore = None
    kl: Use | None = None
    kl_coef: NonNegative = 0.0
    entropy_coef: float = 0.0
    aggregate: Aggregation = "token-mean"
    norm: float | None = None
    filters: tuple[Use, ...] = ()
    critic: bool = False
    value_clip: Positive | None = None
    rollouts: Literal["sampled", "demonstrations", "mixed"] = "sampled"
    passing: float = 1.0
    defaults: Mapping[str, Any] = {}

    def __attrs_post_init__(self) -> None:
        """Convert parts given as text, a mapping or a marked object to `Use`."""
        for part in (*PARTS, *PART_LISTS):
            value = getattr(self, part)
            if value is None:
                continue
            many = part in PART_LISTS
            kind: Any = tuple[Use, ...] if many and isinstance(value, list | tuple) else Use
            kind = OneOrMore if part in COMBINED else kind
            made = CONVERTER.structure(value, kind)
            object.__setattr__(self, part, (made,) if many and isinstance(made, Use) else made)


C = TypeVar("C", bound=type)
_FIELD = type(attrs.field())


@named
def algorithm(name: str, **defaults: Any) -> Any:
    """Mark an algorithm: a subclass of `rlsdk.Algorithm` that overrides some defaults, or the defaults alone.

        @rlsdk.algorithm("msoft")
        class MSoft(rlsdk.Algorithm):
            policy_loss = "soft_clip"

        calm = rlsdk.algorithm("calm", policy_loss={"use": "soft_clip", "temperature": 0.1})

    A part is a name, a mapping with `use`, a marked object or a `Use`. A name without prefix is looked up first in the
    algorithm's plugin, then among the built-in components.

    Args:
        name: Name within the plugin.
        **defaults: Fields of `rlsdk.Algorithm`; if given, there is no class to mark, and the algorithm is returned.

    Raises:
        PluginError: A default is not a field of `rlsdk.Algorithm`, or has the wrong type.
    """
    if not defaults:
        return _marked(name)
    parts = []
    for field, value in defaults.items():
        component = component_of(value)
        shown = value.get("use") if isinstance(value, Mapping) else value
        parts.append(f"{field} `{shown if component is None else component.name}`")
    doc = f"`rlsdk.Algorithm` with {', '.join(parts)}."
    # Two frames up: `named` is between this function and the module that calls it.
    namespace = {**defaults, "__doc__": doc, "__module__": sys._getframe(2).f_globals.get("__name__", "__main__")}
    return _marked(name)(type(name, (Algorithm,), namespace))


def _marked(name: str) -> Callable[[C], C]:
    marking = mark("algorithm", name)

    def declare(cls: C) -> C:
        if not (inspect.isclass(cls) and attrs.has(cls)):
            shown = getattr(cls, "__name__", repr(cls))
            raise PluginError(
                f"@rlsdk.algorithm({name!r}) marks a class of defaults; write class {shown}(rlsdk.Algorithm)"
            )
        made: Any = cls if "__attrs_attrs__" in vars(cls) else _as_fields(name, cls)
        _expect_known_fields(name, made)
        _expect_to_be_made(name, made)
        return cast(C, marking(made))

    return declare


def _as_fields(name: str, cls: C) -> C:
    """Convert a plain subclass to an attrs class whose assignments become defaults of the base's fields."""
    base = next(each for each in cls.__mro__ if "__attrs_attrs__" in vars(each))
    attrs.resolve_types(base)
    types = {field.name: field.type for field in attrs.fields(base)}
    attributes = {
        key: value for key, value in vars(cls).items() if key in types or not _is_method_or_private(key, value)
    }
    annotations = inspect.get_annotations(cls)
    computes = any(getattr(value, "takes_self", False) for value in attributes.values())
    if strange := [
        key for key in {**attributes, **annotations} if key not in types and not (computes and key in annotations)
    ]:
        raise PluginError(f"@rlsdk.algorithm({name!r}): {unknown('field', strange[0], types)}")
    for key, value in attributes.items():
        if key in types and not isinstance(value, _FIELD | attrs.Factory):
            setattr(cls, key, _structured(name, key, value, types[key]))
    new = {key: kind for key, kind in annotations.items() if key not in types}
    cls.__annotations__ = {**new, **{key: types[key] for key in attributes if key in types}}
    return attrs.frozen(kw_only=True)(cls)


def _is_method_or_private(key: str, value: Any) -> bool:
    """Return True for an attribute that is not a default; a marked function is one."""
    if key.startswith("_") or isinstance(value, property | classmethod | staticmethod):
        return True
    return inspect.isfunction(value) and component_of(value) is None


def _structured(name: str, field: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is tuple and not isinstance(value, list | tuple):
        value = (value,)
    structured, faults = structure(value, kind)
    if faults:
        listed = "; ".join(f"{field}{path}: {text}" for path, text in faults)
        raise PluginError(f"@rlsdk.algorithm({name!r}): {listed}")
    return structured


def _expect_known_fields(name: str, cls: type) -> None:
    """Refuse a field that looks like a misspelt field of `rlsdk.Algorithm`, since nothing would read it."""
    fields = attrs.fields(cls)
    if not issubclass(cls, Algorithm) or any(getattr(field.default, "takes_self", False) for field in fields):
        return
    known = [field.name for field in attrs.fields(Algorithm)]
    for field in fields:
        if field.name not in known and nearest(field.name, known):
            raise PluginError(f"@rlsdk.algorithm({name!r}): {unknown('field', field.name, known)}")


def _expect_to_be_made(name: str, cls: Any) -> None:
    """Refuse invalid defaults; a field without a default is left to the configuration."""
    if any(field.default is attrs.NOTHING for field in attrs.fields(cls)):
        return
    try:
        cls()
    except Exception as error:  # a computed default is code that may raise anything
        raise PluginError(f"@rlsdk.algorithm({name!r}): {error}") from error
