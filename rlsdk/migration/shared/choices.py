"""Names that several trainers use -> rlsdk's."""

from __future__ import annotations

from rlsdk.migration.values import Choice, choice

KL = Choice(
    {
        **dict.fromkeys(("kl", "k1"), "k1"),
        **dict.fromkeys(("mse", "k2"), "k2"),
        **dict.fromkeys(("low_var_kl", "k3", "low_var", "corrected_k3"), "low_var"),
        "abs": "abs",
    },
    "the estimator",
)
DTYPE = Choice(
    {
        **dict.fromkeys(("bfloat16", "bf16", "torch.bfloat16"), "bfloat16"),
        **dict.fromkeys(("float16", "fp16", "half", "torch.float16"), "float16"),
        **dict.fromkeys(("float32", "fp32", "float", "torch.float32"), "float32"),
    },
    "the dtype",
)
SCHEDULE = Choice(
    {
        **dict.fromkeys(("constant", "constant_with_warmup"), "constant"),
        "linear": "linear",
        **dict.fromkeys(("cosine", "cosine_with_min_lr", "cosine_with_warmup", "cosine_warmup_with_min_lr"), "cosine"),
        "polynomial": "polynomial",
        **dict.fromkeys(("inverse_sqrt", "inverse-square-root"), "inverse_sqrt"),
        **dict.fromkeys(("wsd", "warmup_stable_decay"), "wsd"),
    },
    "the schedule",
)
DECAY_SHAPE = Choice(
    {"linear": "linear", "cosine": "cosine", **dict.fromkeys(("1-sqrt", "minus_sqrt"), "sqrt")}, "the decay"
)
AGGREGATION = choice(
    ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"), "the aggregation"
)
ATTENTION = Choice(
    {
        **dict.fromkeys(("fa2", "flash_attention_2", "flash_attn", "flash_attention"), "flash_attention_2"),
        **dict.fromkeys(("sdpa", "auto"), "sdpa"),
        "eager": "eager",
    },
    "the attention",
)
