"""Estimate the memory of a learner rank from the configs of its models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

from rlsdk.contracts import ActorSpec, MemoryUse, Model, Roles
from rlsdk.kit import RankMemory, count_parameters

if TYPE_CHECKING:
    from rlsdk_fsdp2.learner import FSDP2Learner

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PROCESS = 440 * 2**20
"""Memory of a rank's process without models: Python, torch and Ray."""


def rank_memory(learner: FSDP2Learner, roles: Roles, place: ActorSpec) -> RankMemory:
    """Return the memory of a rank without activations.

    Args:
        learner: Options of the learner.
        roles: Models; only their configs are read.
        place: Number of ranks, and their device.
    """
    # Name, bytes of the rank's share, bytes that it gathers in addition, and the only phase in which they are needed.
    parts: list[tuple[str, int, int, Literal["", "learn"]]] = []
    if roles.actor is not None:
        actor = _Size.of(learner, roles.actor, place, adapted=True)
        parts += [
            ("learner weights", 4 * actor.trained + actor.frozen, actor.gathered, ""),
            ("learner gradients", 4 * actor.trained, 0, "learn"),
            ("learner optimiser state", int(learner.state_bytes * actor.trained), 0, "learn"),
        ]
    if roles.critic is not None:
        critic = _Size.of(learner, roles.critic, place)
        parts += [
            ("critic", 4 * critic.trained, critic.gathered, ""),
            ("critic gradients", 4 * critic.trained, 0, "learn"),
            ("critic optimiser state", int(learner.state_bytes * critic.trained), 0, "learn"),
        ]
    if roles.reference is not None and not (learner.lora and roles.reference == roles.actor):
        reference = _Size.of(learner, roles.reference, place)
        size = (_BYTES[roles.reference.dtype] + (4 if roles.copies_reference else 0)) * reference.trained
        parts.append(("reference model", size, reference.gathered, "learn"))
    if learner.offload == "all" and place.device == "cuda":
        uses = [MemoryUse(role, share, on_host=True) for role, share, _, _ in parts]
        uses.append(MemoryUse("gathered weights", sum(gathered for _, _, gathered, _ in parts)))
    else:
        uses = [MemoryUse(role, share + gathered, turn=turn) for role, share, gathered, turn in parts]
        if place.device == "cuda" and place.colocated:  # while engines generate on its GPU
            moved = [share for role, share, _, turn in parts if turn and not role.endswith("gradients")]
            uses.append(MemoryUse("sleeping learner", sum(moved), on_host=True))
    uses.append(MemoryUse("learner process", _PROCESS, on_host=place.device == "cuda"))
    return RankMemory(uses=tuple(uses), step=0)


@attrs.frozen(kw_only=True)
class _Size:
    """A rank's shard of a model.

    Attributes:
        trained: Number of parameters that are trained, or would be without an adapter.
        frozen: Bytes of the others.
        gathered: Bytes of gathered weights at one time: embeddings and head, one layer, and the next one prefetched.
    """

    trained: int
    frozen: int
    gathered: int

    @classmethod
    def of(cls, learner: FSDP2Learner, model: Model, place: ActorSpec, *, adapted: bool = False) -> _Size:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code, local_files_only=True
        ).get_text_config()
        every, trained = count_parameters(model, learner.lora if adapted else None)
        width, together = _BYTES[model.dtype], learner.tensor_parallel
        outside = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
        adapter = trained if trained < every else 0
        # Embeddings and head are whole on all ranks that divide layers.
        layers = max(0, every - adapter - outside) // together
        ahead = layers if not learner.reshard_after_forward else min(layers, 2 * layers // config.num_hidden_layers)
        ranks = max(1, place.world_size // together)  # too few are refused elsewhere
        if adapter:  # only one of its two matrices is divided with its layer; counted as whole, since it is small
            return cls(
                trained=-(-adapter // ranks),
                frozen=width * (outside + layers) // ranks,
                gathered=width * (outside + ahead),
            )
        return cls(trained=-(-(outside + layers) // ranks), frozen=0, gathered=width * (outside + ahead))
