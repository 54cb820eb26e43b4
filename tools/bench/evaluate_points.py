"""Evaluate saved models of all trainers on held-out tasks, with transformers only.

    python evaluate_points.py '{"held_out": …, "max_tokens": …, "temperature": …, "points": {"0": FOLDER, …}}'

It prints JSON: batch -> accuracy of one sampled answer and of the greedy answer, 0 to 1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from shared_reward import RIGHT, countdown


def accuracy(folder: str, rows: list[dict[str, Any]], max_tokens: int, temperature: float) -> dict[str, float]:
    """Return the share of right answers, `sampled` and `greedy`, with a fixed random seed."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, return_token_type_ids=False)
    found = {}
    for name, how in (("sampled", {"do_sample": True, "temperature": temperature, "top_k": 0}), ("greedy", {})):
        torch.manual_seed(0)
        with torch.inference_mode():
            ids = model.generate(**prompts, max_new_tokens=max_tokens, **{"do_sample": False, **how})
        texts = tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        right = [countdown(t, row["target"], row["numbers"]) == RIGHT for t, row in zip(texts, rows, strict=True)]
        found[name] = sum(right) / len(right)
    return found


def main() -> None:
    """Evaluate, and print the accuracies."""
    asked = json.loads(sys.argv[1])
    rows = [json.loads(line) for line in Path(asked["held_out"]).read_text(encoding="utf-8").splitlines()]
    limits = (asked["max_tokens"], asked["temperature"])
    print(json.dumps({step: accuracy(folder, rows, *limits) for step, folder in asked["points"].items()}))


if __name__ == "__main__":
    main()
