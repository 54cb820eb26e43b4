"""Reward from a transformers sequence classifier."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs

from rlsdk.contracts import DType
from rlsdk.errors import DataError, ValueFault
from rlsdk.limits import above
from rlsdk.marks import reward
from rlsdk.types import Rollout, Score, is_reward


@reward("reward_model", batch=True, runs="actor", cache=True)
@attrs.define(kw_only=True, eq=False)
class RewardModel:
    """The logit of a sequence classifier for prompt and answer, computed in batches in a separate actor.

    It judges the conversation up to the policy's last answer: nothing after it counts, and assistant messages in the
    prompt are part of the prompt. If the policy wrote nothing, the score is invalid.

    The model's tokenizer and chat template render the text; without a template, prompt and response are concatenated.
    Tokens beyond `max_length` are cut from the beginning, since the answer matters. If the logit is not finite, the
    score is invalid.

    Attributes:
        path: Folder of a transformers sequence classifier, or a hub id.
        label: Index of the logit, for models with several.
        activation: `sigmoid` maps the logit to a probability.
        dtype: Dtype of the weights.
        device: `auto` uses CUDA if `gpus` is above 0.
        gpus: GPUs of the actor; a fraction is allowed.
        batch_tokens: Maximum tokens of one forward pass, including padding; a longer text gets its own pass.
        max_length: Maximum tokens of a conversation.
        trust_remote_code: Run Python code shipped with the model; keep false unless you have read that code.
        timeout: Time limit in seconds for all conversations of one call.
    """

    path: str
    label: int = 0
    activation: Literal["none", "sigmoid"] = "none"
    dtype: DType = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: float = 0.0
    batch_tokens: int = 16_384
    max_length: int = 4_096
    trust_remote_code: bool = False
    timeout: Annotated[float, above(0)] = 600.0
    _tokenizer: Any = attrs.field(init=False, default=None)
    _model: Any = attrs.field(init=False, default=None)
    _own_padding: bool = attrs.field(init=False, default=True)

    def __attrs_post_init__(self) -> None:
        if self.batch_tokens < 1 or self.max_length < 1 or self.label < 0 or self.gpus < 0:
            raise ValueFault("batch_tokens and max_length must be at least 1, label and gpus at least 0")
        looks_local = self.path.startswith((".", "/", "~")) or self.path.count("/") != 1
        if looks_local and not (Path(self.path).expanduser() / "config.json").is_file():
            raise ValueFault(
                f"path: there is no folder {self.path!r} with a config.json (nor is it a hub id, ORG/NAME)"
            )
        if (config := Path(self.path).expanduser() / "config.json").is_file():
            self._check(json.loads(config.read_text(encoding="utf-8")))

    def _check(self, config: Mapping[str, Any]) -> None:
        """Refuse a model's configuration without a classifier, or with too few labels, before anything starts."""
        models = config.get("architectures") or []
        if models and all(model.endswith("ForCausalLM") for model in models):
            raise ValueFault(
                f"path: {self.path!r} is a language model ({', '.join(models)}), not a trained classifier; give one "
                "that transformers' AutoModelForSequenceClassification saved, or use the reward judge"
            )
        logits = len(config.get("id2label") or (0, 1))  # transformers writes the labels unless there are two
        if self.label >= logits:
            raise ValueFault(f"label: {self.label} given, but {self.path!r} has {logits} logits, numbered from 0")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Score rollouts.

        Returns:
            One score per rollout.

        Raises:
            DataError: The model has no logit `label`.
        """
        self._open()
        ids = [self._ids(rollout) for rollout in rollouts]
        scores: list[Score] = [Score.invalid("the policy wrote nothing")] * len(ids)
        for batch in _batches([len(each) for each in ids], self.batch_tokens):
            for index, value in zip(batch, self._values([ids[i] for i in batch]), strict=True):
                fault = Score.invalid(f"the model's logit is {value}")
                scores[index] = Score(value) if is_reward(value) else fault
        return scores

    def _open(self) -> None:
        if self._model is not None:
            return
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        # An actor that reserves no GPU still sees all of them, which engines and learner may fill.
        usable = self.gpus > 0 and torch.cuda.is_available()
        device = self.device if self.device != "auto" else ("cuda" if usable else "cpu")
        path = str(Path(self.path).expanduser()) if self.path.startswith("~") else self.path
        code = self.trust_remote_code
        self._tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=code)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=getattr(torch, self.dtype), trust_remote_code=code, output_loading_info=True
        )
        if missing := sorted(report["missing_keys"]):  # transformers would fill them with random numbers
            raise DataError(f"{self.path} is not a trained classifier: it lacks {', '.join(missing[:3])}")
        if self.label >= model.config.num_labels:
            raise DataError(f"{self.path} has {model.config.num_labels} logits; label {self.label} does not exist")
        self._own_padding = model.config.pad_token_id is not None
        self._model = model.to(device).eval()

    def _ids(self, rollout: Rollout) -> list[int]:
        written = [i for i, m in enumerate(rollout.messages) if m.role == "assistant" and not m.prompt]
        if not written:
            return []
        messages = rollout.messages[: written[-1] + 1]
        if self._tokenizer.chat_template:
            chat = [{"role": m.role, "content": m.text} for m in messages]
            ids = self._tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
        else:
            prompt = rollout.task.prompt
            head = prompt if isinstance(prompt, str) and not any(m.role == "user" for m in messages) else ""
            ids = self._tokenizer(head + "".join(m.text for m in messages))["input_ids"]
        return list(ids)[-self.max_length :]

    def _values(self, ids: Sequence[Sequence[int]]) -> list[float]:
        import torch

        config, longest = self._model.config, max(map(len, ids))
        if not self._own_padding:  # the model takes the last other token for the end of a text, so none may end with it
            ends = {each[-1] for each in ids}
            config.pad_token_id = next(token for token in itertools.count() if token not in ends)
        pad = config.pad_token_id
        tokens = torch.tensor([[*each, *[pad] * (longest - len(each))] for each in ids], device=self._model.device)
        mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in ids], device=tokens.device)
        with torch.inference_mode():
            logits = self._model(input_ids=tokens, attention_mask=mask).logits[:, self.label].float()
        return [float(v) for v in (logits.sigmoid() if self.activation == "sigmoid" else logits)]


def _batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Batch the indices of texts of similar length, up to `most` padded tokens each; empty texts are skipped."""
    batches: list[list[int]] = []
    for index in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= most:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
