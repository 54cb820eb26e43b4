"""Check the chat templates in TRL's wheel, and write `docs/templates.md`: python tools/chat_templates.py."""

from __future__ import annotations

import datetime
import sys
from importlib import metadata

from curves import ROOT

sys.path.insert(0, str(ROOT))
from rlsdk.testing.model_check import PROPERTIES
from tests.chat_templates import TemplateResult, shipped, tried

PAGE = ROOT / "docs" / "templates.md"
HEAD = """# Chat templates

`python tools/chat_templates.py` tests the [properties of `rlsdk check model`](howto/model.md) on each chat template in
TRL's wheel, except its training variants, and writes this page; a test compares both. Templates are tried with a byte
tokenizer that has every control token named in the template; `rlsdk check model` uses a model's own tokenizer.

✓ holds; n/a: not supported by the template; ✗ fails. *Thought dropped* means that such a turn [begins another
rollout](howto/workflow.md#how-tokens-are-recorded) of the trajectory, *kept, after a call* that results are shown only
after calls, and *refused* that the template itself refuses them.
"""


def page(results: dict[str, TemplateResult]) -> str:
    """Return the page of these results."""
    held = sum(all(each.ok for each in result.properties) for result in results.values())
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in ("trl", "transformers"))
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    columns = ["template", "a question follows", "a tool's result follows", "parser of calls"]
    columns += [f"`{name}`" for name in PROPERTIES]
    lines = [HEAD, f"With {versions}, on {day}: {held} of {len(results)} ", ""]
    lines[1] += "templates keep every property."
    lines += ["| " + " | ".join(columns) + " |", "| --- " * 4 + "| :-: " * len(PROPERTIES) + "|"]
    lines += ["| " + " | ".join([name, *result.cells]) + " |" for name, result in results.items()]
    lines += ["", "## What fails", ""]
    for name, result in results.items():
        for each in result.properties:
            if not each.ok:
                lines += [f"**{name}**, `{each.name}`:", "", "```text", *_wrapped(each.reason), "```", ""]
    lines += ["## What does not apply", "", "| property | reason | templates |", "| --- | --- | --- |"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, result in results.items():
        for each in result.properties:
            if each.ok == "n/a":
                reasons.setdefault((each.name, _general(each.reason)), []).append(name)
    lines += [f"| `{name}` | {reason} | {', '.join(names)} |" for (name, reason), names in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def _general(reason: str) -> str:
    """Return a reason without the part that names the template."""
    return reason.partition(": ")[2] if reason.startswith("the chat template of") else reason


def _wrapped(text: str, width: int = 118) -> list[str]:
    return [text[i : i + width] for i in range(0, len(text), width)]


if __name__ == "__main__":
    PAGE.write_text(page({name: tried(name) for name in shipped()}), "utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(shipped())} templates")
