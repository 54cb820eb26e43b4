"""A tiny random Qwen2 with tied embeddings, created on the fly, and its results computed without the engines."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rlsdk.contracts import Model, Weights
from rlsdk.weights import TIED_HEAD, from_weights, to_weights

SYMBOLS = (
    "<pad>",
    "<eos>",
    "<unk>",
    "+",
    "-",
    "*",
    "/",
    "(",
    ")",
    "=",
    ",",
    ">",
    ":",
    "a",
    "b",
    "<answer>",
    "</answer>",
)
EOS = 1


def vocabulary() -> dict[str, int]:
    return {token: index for index, token in enumerate([*SYMBOLS, *map(str, range(113))])}


def make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel(vocabulary(), unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d+|</?answer>|[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def make_model(
    folder: Path, *, seed: int = 0, layers: int = 2, tied: bool = True, heads: int = 4, kv_heads: int = 4
) -> Model:
    """Write the model and, in a folder of its own, the tokenizer.

    Apart, because transformers replaces the pre-tokenizer of a tokenizer that lies beside a config of type qwen2.
    """
    config = Qwen2Config(
        vocab_size=len(vocabulary()),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "tokenizer")
    return Model(path=str(folder / "model"), tokenizer=str(folder / "tokenizer"), max_length=256)


@functools.cache
def _net(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path).eval()


@functools.cache
def _state(path: str) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


def changed(model: Model, version: int, *, seed: int = 1, scale: float = 0.05) -> Weights:
    """Weights like the model's with noise, tied tensors under both names."""
    torch.manual_seed(seed)
    state = _state(model.path)
    tensors = {name: p + scale * torch.randn_like(p) for name, p in state.items() if name != TIED_HEAD}
    if TIED_HEAD in state:
        tied = _net(model.path).config.tie_word_embeddings
        own = state[TIED_HEAD] + scale * torch.randn_like(state[TIED_HEAD])
        tensors[TIED_HEAD] = tensors["model.embed_tokens.weight"] if tied else own
    return to_weights(version, tensors)


def original(model: Model, version: int = 0) -> Weights:
    """The folder's own weights."""
    return changed(model, version, scale=0.0)


@torch.inference_mode()
def reference_logprobs(
    model: Model,
    token_ids: np.ndarray,
    weights: Weights | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> np.ndarray:
    """Logprobs by transformers of each token but the first, float32 `[k - 1]`: one sequence, no cache."""
    net = _net(model.path)
    state = _state(model.path) if weights is None else dict(from_weights(weights))
    net.load_state_dict(state)
    logits = net(torch.as_tensor(token_ids)[None], use_cache=False).logits[0, :-1].float() / (temperature or 1.0)
    if top_k:
        logits[logits < logits.topk(top_k).values[:, -1:]] = -torch.inf
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        kept = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1) < top_p
        logits = torch.full_like(logits, -torch.inf).scatter(-1, order, ordered.masked_fill(~kept, -torch.inf))
    target = torch.as_tensor(token_ids)[1:, None]
    return logits.log_softmax(-1).gather(-1, target)[:, 0].numpy()


def make_classifier(folder: Path, *, labels: int = 1, template: str = "", broken: bool = False) -> Path:
    """Write a sequence classifier with random weights, and its tokenizer, and return the folder."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=labels,
        pad_token_id=0,
        initializer_range=0.3,
    )
    model = LlamaForSequenceClassification(config)
    if broken:
        torch.nn.init.constant_(model.score.weight, float("nan"))
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder
