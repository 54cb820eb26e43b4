"""Memory that a rank of the learner will need, from the configs of its models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlsdk.contracts import ActorSpec, MemoryUse, Model, Roles
from rlsdk.kit import RankMemory, count_parameters

if TYPE_CHECKING:
    from rlsdk_fsdp2.learner import FSDP2Learner

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PROCESS = 420 * 2**20
"""Memory of a rank's process without any model: Python, torch and Ray."""


def rank_memory(learner: FSDP2Learner, roles: Roles, place: ActorSpec) -> RankMemory:
    """Return what a rank holds beside the activations of its passes.

    Args:
        learner: Options of the learner.
        roles: Models; only their configs are read.
        place: Number of ranks, and their device.
    """
    ranks, whole = place.world_size, not learner.reshard_after_forward
    every, trained = count_parameters(roles.actor, learner.lora)
    share = -(-trained // ranks)
    frozen = (every - trained) * _BYTES[roles.actor.dtype] // ranks
    uses = [
        MemoryUse("learner weights", 4 * share + frozen + _gathered(roles.actor, every, whole=whole)),
        MemoryUse("learner gradients", 4 * share),
        MemoryUse("learner optimiser state", 8 * share),
    ]
    if roles.critic is not None:
        every = count_parameters(roles.critic)[0]
        share = -(-every // ranks)
        uses += [
            MemoryUse("critic", 8 * share + _gathered(roles.critic, every, whole=whole)),
            MemoryUse("critic optimiser state", 8 * share),
        ]
    if roles.reference is not None and not (learner.lora and roles.reference == roles.actor):
        every = count_parameters(roles.reference)[0]
        size = every * _BYTES[roles.reference.dtype] // ranks
        uses.append(MemoryUse("reference model", size + _gathered(roles.reference, every, whole=False)))
    uses.append(MemoryUse("learner process", _PROCESS, on_host=place.device == "cuda"))
    return RankMemory(uses=tuple(uses), step=0)


def _gathered(model: Model, every: int, *, whole: bool) -> int:
    """Bytes of weights that are gathered at one time: embeddings and head, one layer, and the next in advance."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        model.path, trust_remote_code=model.trust_remote_code, local_files_only=True
    ).get_text_config()
    outside = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    layer = max(0, every - outside) // config.num_hidden_layers
    return _BYTES[model.dtype] * (every if whole else min(every, outside + 2 * layer))
