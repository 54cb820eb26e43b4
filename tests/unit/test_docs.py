"""The generated pages of the documentation; `make docs` checks their links."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import rlsdk

pytest.importorskip("mkdocs")
TOOL = Path(__file__).resolve().parents[2] / "tools" / "docs_algorithms.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("docs_algorithms", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def pages(tool):
    return tool.pages()


def test_every_algorithm_and_every_part_has_its_place(tool, pages):
    assert {f"{name}.md" for name in rlsdk.names("algorithm")} < set(pages)
    for kind in tool.PARTS:
        for name in rlsdk.names(kind):
            assert f"\n### `{name}` {{ #{tool.anchor(name)} }}\n" in pages[f"parts/{kind}.md"]
            assert f"(parts/{kind}.md#{tool.anchor(name)})" in pages["index.md"]


def test_a_page_says_what_an_algorithm_is_made_of(pages):
    page = pages["grpo.md"]
    assert "* **Paper:** [arXiv:2402.03300](https://arxiv.org/abs/2402.03300), eq. 3 and 4;" in page
    assert "\n### Advantage: `grpo`\n" in page
    assert "* **Formula:** `A = (r - μ) / (σ + 1e-6)`." in page
    assert "\n| `dual_clip` | `20.0` |" in page  # the algorithm's value, not the loss's default
    assert "\n### KL: `low_var`\n" in page
    assert "\n### Aggregation: `seq-mean-token-mean`\n\nMean over rollouts of the mean over their tokens" in page
    assert "\n| `kl_coef` | `0.04` |" in page
    assert "\n| `filters` | `[]` |" in page


def test_a_part_says_who_uses_it(pages):
    assert "Part of [`dapo`](../dapo.md)." in pages["parts/shaping.md"]
    assert "Reads `logprobs`, `ref_logprobs`." in pages["parts/shaping.md"]


def test_links(tool):
    text = "GPG, arXiv:2504.02546, eq. 7; doi:10.1007/BF00992696, see (http://a.b/c.html)."
    assert tool.linked(text) == (
        "GPG, [arXiv:2504.02546](https://arxiv.org/abs/2504.02546), eq. 7; "
        "[doi:10.1007/BF00992696](https://doi.org/10.1007/BF00992696), see (<http://a.b/c.html>)."
    )
