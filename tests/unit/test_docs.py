"""The generated pages of the documentation; `make docs` checks their links."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import rlsdk

pytest.importorskip("mkdocs")
ROOT = Path(__file__).resolve().parents[2]


def load(name):
    """A module of tools/, loaded as mkdocs loads its hooks."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def tool():
    return load("docs_algorithms")


@pytest.fixture(scope="module")
def reference():
    return load("docs_reference")


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


def test_the_reference_lists_the_public_surface_and_each_name_once(reference):
    pages = reference.pages()
    assert set(pages) == {"index.md", *(f"{module.replace('.', '_')}.md" for module in rlsdk.PUBLIC_MODULES)}
    shown = re.findall(r"^::: (.*)$", "".join(pages.values()), re.MULTILINE)
    assert len(shown) == len(set(shown))
    assert {f"rlsdk.{name}" for name in rlsdk.__all__} < set(shown)
    assert "rlsdk.types.Task" not in shown and "rlsdk.types.STATUSES" in shown


def test_mentions_of_public_names_become_links(reference):
    prose = "A `rlsdk.types.Task`, `rlsdk.nothing`, [`rlsdk.Score`](x.md)."
    text = f"# `rlsdk.Task`\n\n{prose}\n```python\n`rlsdk.Task`\n```\n"
    assert reference.mentions(text) == text.replace("`rlsdk.types.Task`", "[`rlsdk.types.Task`][rlsdk.Task]")


def test_the_page_of_models_sums_up_the_measurements(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    architectures = load("architectures")
    measured = architectures.read_page(architectures.RUNS)
    assert len(measured) > 100
    assert architectures.summary(measured) in (ROOT / "docs" / "models.md").read_text()


def test_pages_have_no_links_that_only_the_site_resolves():
    """Relative links lead to files, and none is written in the form of cross-references between generated pages."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    prose = {
        page: re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE) for page in pages
    }
    dead = [
        (page.relative_to(ROOT).as_posix(), target)
        for page, text in prose.items()
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert dead == []
    assert [page.name for page, text in prose.items() if re.search(r"\]\[[a-z]", text)] == []
