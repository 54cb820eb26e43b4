"""The folder of an export: what transformers would refuse to write, and the files of a tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GPT2Config, Qwen3_5Config

from rlsdk.contracts import Model
from rlsdk.learners.export import WeightExporter, copy_tokenizer, write_model
from rlsdk.learners.model import load_policy
from rlsdk.learners.ranks import Ranks

TOKENIZER = """
from transformers import PreTrainedTokenizer

class LetterTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"ranks": "letters.tiktoken"}

    def __init__(self, ranks, **options):
        with open(ranks, encoding="utf-8") as file:
            self.letters = file.read().strip()
        super().__init__(**options)

    @property
    def vocab_size(self):
        return len(self.letters)

    def get_vocab(self):
        return {letter: i for i, letter in enumerate(self.letters)}

    def _tokenize(self, text, **_):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.letters.index(token)

    def _convert_id_to_token(self, index):
        return self.letters[index]
"""


@pytest.mark.parametrize(
    "written",
    [
        {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 3]},  # as of many models, which name no `do_sample`
        {"do_sample": False, "temperature": 0.6},
        {"do_sample": True, "temperature": 0.6, "pad_token_id": 0},
        None,
    ],
    ids=["no do_sample", "greedy", "sampled", "none"],
)
def test_the_generation_config_is_the_models_even_if_transformers_would_not_save_it(
    tied: Model, tmp_path: Path, written: dict[str, Any] | None
):
    base = tmp_path / "base"
    shutil.copytree(tied.path, base)
    file = base / "generation_config.json"
    if written is None:
        file.unlink()
    else:
        file.write_text(json.dumps(written))
    net = AutoModelForCausalLM.from_pretrained(base)
    config = net.generation_config
    write_model(tmp_path / "export", net, net.state_dict(), attrs.evolve(tied, path=str(base)))
    assert net.generation_config is config
    found = GenerationConfig.from_pretrained(tmp_path / "export").to_diff_dict()
    if written is None:
        assert found == config.to_diff_dict()
    else:
        assert {name: value for name, value in found.items() if name != "transformers_version"} == written
    AutoModelForCausalLM.from_pretrained(tmp_path / "export")


def test_the_language_model_of_a_vision_model_keeps_its_dropout(tmp_path: Path):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention"]}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 20, **heads}
    config = Qwen3_5Config(text_config={**sizes, "pad_token_id": 0, "attention_dropout": 0.2})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    config.save_pretrained(tmp_path / "base")  # that of the language model alone was saved with it
    policy = load_policy(Model(path=str(tmp_path / "base")), "eager", checkpointing=False)
    assert policy.model.config.attention_dropout == 0.0
    assert policy.dropouts["", "attention_dropout"] == 0.2


def test_the_config_keeps_its_dropout_which_the_learner_leaves_out(tmp_path: Path):
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=16, attn_pdrop=0.2, embd_pdrop=0.0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    source = Model(path=str(tmp_path / "base"))
    policy = load_policy(source, "eager", checkpointing=False)
    assert policy.model.config.attn_pdrop == policy.model.config.resid_pdrop == 0.0

    def gather(*, keep: bool) -> Any:
        return policy.model.state_dict()

    WeightExporter(policy.model, source, Ranks(0, 1, "cpu"), None, gather, policy.dropouts).export(tmp_path / "export")
    found = AutoConfig.from_pretrained(tmp_path / "export")
    assert (found.attn_pdrop, found.resid_pdrop, found.embd_pdrop) == (0.2, 0.1, 0.0)
    assert policy.model.config.attn_pdrop == 0.0


def test_a_tokenizer_with_its_own_code_opens_from_the_export(tmp_path: Path):
    source, export = tmp_path / "source", tmp_path / "export"
    for folder in (source, export):
        folder.mkdir()
    (source / "tokenization_letters.py").write_text(TOKENIZER)
    (source / "letters.tiktoken").write_text("abc")
    (source / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_letters.LetterTokenizer", None]}})
    )
    copy_tokenizer(str(source), export, trust_remote_code=True)
    found = AutoTokenizer.from_pretrained(export, trust_remote_code=True)
    assert found.convert_tokens_to_ids(found.tokenize("cab")) == [2, 0, 1]


def test_code_beside_a_tokenizer_that_is_not_trusted_stays_where_it_is(tmp_path: Path):
    source, export = tmp_path / "source", tmp_path / "export"
    for folder in (source, export):
        folder.mkdir()
    (source / "setup.py").write_text("")
    (source / "tokenizer.json").write_text("{}")
    copy_tokenizer(str(source), export, trust_remote_code=False)
    assert [file.name for file in export.iterdir()] == ["tokenizer.json"]
