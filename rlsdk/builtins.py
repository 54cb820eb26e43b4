"""The plugin `core`: the modules of the built-in components of each kind, imported when the kind is first used."""

from __future__ import annotations

MODULES: dict[str, tuple[str, ...]] = {
    "reward": (
        "rlsdk.rewards.annotation",
        "rlsdk.rewards.reward_model",
        "rlsdk.rewards.countdown",
        "rlsdk.rewards.foreign",
        "rlsdk.rewards.format",
        "rlsdk.rewards.matching",
        "rlsdk.rewards.math_answer",
        "rlsdk.rewards.penalties",
        "rlsdk.rewards.code_tests",
        "rlsdk.rewards.judge",
    ),
    "shaping": ("rlsdk.algorithms.shaping",),
    "advantage": ("rlsdk.algorithms.advantages", "rlsdk.algorithms.returns"),
    "policy_loss": (
        "rlsdk.algorithms.losses",
        "rlsdk.algorithms.losses_data",
    ),
    "correction": ("rlsdk.algorithms.corrections",),
    "kl": ("rlsdk.algorithms.kl",),
    "algorithm": ("rlsdk.algorithms.named",),
    "filter": ("rlsdk.algorithms.filters",),
    "buffer": ("rlsdk.algorithms.buffers",),
    "stop": ("rlsdk.algorithms.buffers",),
    "workflow": (
        "rlsdk.workflows.conversations",
        "rlsdk.workflows.agent",
        "rlsdk.workflows.environment",
        "rlsdk.workflows.tools",
    ),
    "environment": ("rlsdk.environments.gymnasium",),
    "tasks": (
        "rlsdk.sources.annotations",
        "rlsdk.sources.countdown",
        "rlsdk.sources.environments",
        "rlsdk.sources.files",
    ),
    "sampler": ("rlsdk.sources.sampling",),
    "engine": ("rlsdk.engines.vllm", "rlsdk.engines.transformers", "rlsdk.engines.openai"),
    "learner": ("rlsdk.learners.deepspeed",),
    "optimizer": ("rlsdk.learners.optimizers",),
    "lr_schedule": ("rlsdk.learners.schedules",),
    "tracker": ("rlsdk.runlog.trackers",),
    "renderer": ("rlsdk.renderers.template",),
    "tool_parser": ("rlsdk.tool_parsers.general", "rlsdk.tool_parsers.native"),
    "diagnosis": ("rlsdk.diagnoses.learning", "rlsdk.diagnoses.rollouts"),
    "weight_transfer": (
        "rlsdk.transfers.object_store",
        "rlsdk.transfers.broadcast",
        "rlsdk.transfers.shared_memory",
        "rlsdk.transfers.cuda_ipc",
    ),
}
