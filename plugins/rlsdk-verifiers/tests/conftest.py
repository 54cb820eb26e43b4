"""Tokens of bytes, and a chat that can also be spoken to.

These tests run where verifiers is installed; `make test-slow` installs it in a folder of its own and runs them
(tests/packages/test_verifiers.py), since its requirements conflict with vLLM's.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from rlsdk.testing import ChatTokenizer, scripted_chat

TOYS = Path(__file__).resolve().parents[3] / "tests" / "packages" / "vf-toys"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="session", autouse=True)
def _verifiers():
    if importlib.util.find_spec("verifiers") is None:
        pytest.skip("verifiers is not installed here; make test-slow runs these tests where it is")
    sys.path.append(str(TOYS))
    yield
    sys.path.remove(str(TOYS))


@pytest.fixture(scope="session")
def codec() -> ChatTokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "</s>"]
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", chat_template=TEMPLATE))


@pytest.fixture
def chat(codec):
    """Makes a chat with a policy that gives these answers, one after the other."""

    def make(task, *answers, max_length=2048):
        left = list(answers)
        made = scripted_chat(task, codec, lambda _: left.pop(0), max_length=max_length)
        made.left = left
        return made

    return make
