"""New packages, each broken in one way, with a clear report by `rlsdk check`."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs
import pytest

from rlsdk.testing import find_plugins_again
from tests.scaffold.conftest import Rlsdk, add_metadata


@attrs.frozen(kw_only=True)
class Broken:
    """A change to the files of `rlsdk new`, and the message about it.

    Attributes:
        kind: Kind of the component.
        old: Text to replace in its code.
        new: The mistake.
        says: Words of the message.
        status: Exit status of `rlsdk check`.
        point: Name of the entry point, if it is wrong.
        module: Module that the entry point names, if it is wrong.
    """

    kind: str
    says: tuple[str, ...]
    old: str = ""
    new: str = ""
    status: int = 1
    point: str | None = None
    module: str | None = None


VARIANTS = {
    "entry point misspelt": Broken(
        kind="reward", module="rlsdk_lb", says=("No module named 'rlsdk_lb'", "did you mean 'rlsdk_lab'")
    ),
    "entry point called core": Broken(
        kind="reward", point="core", status=2, says=("no plugin 'lab'", "the name 'core' belongs to rlsdk")
    ),
    "option without an annotation": Broken(
        kind="reward",
        old="limit: Count = 60",
        new="limit=60",
        says=("options-typed", "none for limit", "limit: int = 3"),
    ),
    "async where nothing is awaited": Broken(
        kind="policy_loss", old="def lab", new="async def lab", says=("lab is async def, but is called without await",)
    ),
    "wrong return type": Broken(
        kind="reward",
        old="return max(0.0, 1.0 - len(rollout.text) / limit)",
        new="return 'short'",
        says=("breaks scores", "got: 'short'", "return a finite number or rlsdk.Score"),
    ),
    "workflow that never ends": Broken(
        kind="workflow",
        old="        await chat.sample()\n        for",
        new="        import asyncio\n\n        while True:\n            await asyncio.sleep(0.01)\n        for",
        says=("breaks ends", "expected: an answer within 10 s", "asyncio.timeout"),
    ),
    "mutable state": Broken(
        kind="reward",
        old="    return max(",
        new="    SEEN.append(rollout.text)\n    return len(SEEN) + max(",
        says=("breaks deterministic", "keep no state between calls"),
    ),
    "torch at the top of a reward": Broken(
        kind="reward",
        old="import rlsdk\n",
        new="import rlsdk\nimport torch\n",
        says=("light-import", "import torch at"),
    ),
    "missing option default": Broken(
        kind="reward",
        old="limit: Count = 60",
        new="limit: Count",
        status=0,
        says=("needs option limit (int >= 1): --option lab.limit=VALUE",),
    ),
    "exception at import": Broken(
        kind="reward",
        old='@rlsdk.reward("lab")',
        new='raise RuntimeError("no licence")\n\n@rlsdk.reward("lab")',
        says=("fails to import: RuntimeError: no licence", "__init__.py, line"),
    ),
    "unknown field in needs": Broken(
        kind="advantage",
        old='@rlsdk.advantage("lab")',
        new='@rlsdk.advantage("lab", needs=("ref_logprob",))',
        says=("unknown field 'ref_logprob', did you mean 'ref_logprobs'?",),
    ),
    "field that needs does not name": Broken(
        kind="advantage",
        old="return scale *",
        new="return x.sequence_sum(x.entropy) + scale *",
        says=("needs-declared", "entropy"),
    ),
    "wrong shape of an advantage": Broken(
        kind="advantage",
        old="return scale * (x.outcomes - x.group_mean(x.outcomes))",
        new="return scale * x.outcomes.mean()",
        says=("breaks shapes", "got: a tensor [] of float32", "never a mean"),
    ),
    "option that is not keyword-only": Broken(
        kind="reward", old="*, limit: Count = 60", new="limit: Count = 60", says=("no config can set limit", "def lab(")
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "never ends" in name else name for name in VARIANTS]
)
def test_a_broken_package_is_caught_in_words(
    name: str, rlsdk: Rlsdk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = VARIANTS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    rlsdk("new", variant.kind, "lab")
    code = tmp_path / "lab" / "rlsdk_lab" / "__init__.py"
    text = code.read_text()
    assert variant.old in text
    changed = text.replace(variant.old, variant.new, 1) if variant.old else text
    code.write_text(changed.replace("\n\n\n@rlsdk", "\n\nSEEN: list[str] = []\n\n\n@rlsdk", 1))
    add_metadata(tmp_path / "lab", "lab", point=variant.point, module=variant.module)
    monkeypatch.syspath_prepend(str(tmp_path / "lab"))
    sys.modules.pop("rlsdk_lab", None)
    find_plugins_again()
    try:
        said = " ".join(rlsdk("check", "lab", status=variant.status).output.split())
    finally:
        sys.modules.pop("rlsdk_lab", None)
        find_plugins_again()
    assert [words for words in variant.says if words not in said] == [], said
