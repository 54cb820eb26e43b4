# ruff: noqa: C408
"""A configuration in the manner of XTuner, which no test runs: it would fail, since the package is not installed."""

import os

from xtuner.v1.config import AdamWConfig, LRConfig
from xtuner.v1.rl.judger import GSM8KJudgerConfig
from xtuner.v1.rl.loss import GRPOLossConfig
from xtuner.v1.train.rl_trainer import RLColocateTrainerConfig

raise SystemExit("this file was executed")

model_path = os.environ["MODEL_PATH"]
nodes = int(os.environ.get("WORLD_SIZE", "1"))
steps = 4
tasks = dict(
    judger_config=GSM8KJudgerConfig(judger_name="gsm8k"),
    sampler_config=dict(
        prompt_repeat_k=2 * steps,
        dataloader_cfg=dict(dataset_config_list=[{"dataset": dict(anno_path="train.jsonl")}]),
    ),
    agent_loop_config=dict(sample_params=dict(max_tokens=1024, temperature=1.0, top_k=0)),
)
trainer = RLColocateTrainerConfig(
    load_from=model_path,
    total_train_steps=10**2,
    train_batch_size=16 * steps,
    train_worker_cfg=dict(
        optim_cfg=AdamWConfig(lr=1e-6, weight_decay=0.1),
        lr_cfg=LRConfig(lr_type="cosine", warmup_ratio=0.1, lr_min=1e-7),
        loss_cfg=GRPOLossConfig(policy_loss_cfg=dict(cliprange_high=0.28, cliprange_low=0.2), use_kl_loss=False),
        optimizer_steps=steps,
        pack_max_length=len(model_path),
    ),
    resources=dict(num_workers=8 * nodes),
    agent_loop_manager_cfg=dict(tasks=tasks),
)
