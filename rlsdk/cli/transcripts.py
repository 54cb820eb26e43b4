"""Rollouts as readable text, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from rlsdk.errors import visible
from rlsdk.plurals import counted
from rlsdk.runlog.rollouts import transcript
from rlsdk.types import Rollout

if TYPE_CHECKING:
    from rlsdk.serving.debug import Debugged

SAMPLED, GIVEN = "green", "dim"


def rows(found: Debugged) -> list[dict[str, Any]]:
    """Return a mapping of JSON values per rollout: conversation, score, and every token with its mask."""
    pairs = zip(found.group.rollouts, found.group.scores, found.seconds, strict=True)
    return [{**transcript(rollout, score), "seconds": round(seconds, 4)} for rollout, score, seconds in pairs]


def summary(found: Debugged, rollouts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all results as JSON values."""
    return {"task": found.group.task.id, "requests": _requests(found), "notes": list(found.notes), "rollouts": rollouts}


def _requests(found: Debugged) -> dict[str, float]:
    seconds, tokens = sum(r.seconds for r in found.requests), sum(r.tokens for r in found.requests)
    longest = max((r.seconds for r in found.requests), default=0.0)
    return {
        "count": len(found.requests),
        "tokens": tokens,
        "seconds": round(seconds, 4),
        "longest_seconds": round(longest, 4),
    }


def show(found: Debugged, out: Console) -> None:
    """Print messages, tokens with their mask, rewards and timings."""
    group = found.group
    out.print(f"[bold]task[/bold] {Text(visible(group.task.id)).markup}, answer {Text(repr(group.task.answer)).markup}")
    for i, (rollout, score, seconds) in enumerate(zip(group.rollouts, group.scores, found.seconds, strict=True), 1):
        part = f", step {rollout.step} of {rollout.trajectory}" if rollout.trajectory else ""
        out.rule(f"rollout {i} of {len(group)}{part}: {rollout.status}")
        for message in rollout.messages:
            name = f" {visible(message.name)}" if message.name else ""
            name += " (prompt)" if message.prompt else ""
            out.print(Text.assemble((f"{message.role}{name}: ", "bold"), _lines(message.text)), soft_wrap=True)
        out.print(_tokens(rollout, found), soft_wrap=True)
        value = f"{score.value:g}" if score.valid else "invalid"
        out.print(Text.assemble(("reward: ", "bold"), value, f" ({_lines(score.reason)})" if score.reason else ""))
        for position, given in rollout.rewards:
            out.print(f"  {given:g} at token {position}")
        metrics = "  ".join(f"{name} {number:g}" for name, number in {**rollout.metrics, **score.metrics}.items())
        out.print(Text.assemble(("metrics: ", "bold"), metrics), soft_wrap=True)
        out.print(Text.assemble(("time: ", "bold"), f"{seconds:.2f} s from the start, scoring included"))
    r = _requests(found)
    out.rule()
    rate = r["tokens"] / r["seconds"] if r["seconds"] else 0.0
    out.print(
        f"{counted(r['count'], 'request')}: {counted(r['tokens'], 'token')}, {rate:.0f} a second within a request, "
        f"the longest {r['longest_seconds']:.2f} s"
    )
    for note in found.notes:
        out.print(f"note: {_lines(note)}", markup=False)


def _lines(text: str) -> str:
    """Return a model's text with its line breaks, but without other terminal control sequences."""
    return visible(text, keep="\n\t")


def _tokens(rollout: Rollout, found: Debugged) -> Text:
    """Return all tokens as text that distinguishes sampled (trained) tokens from given ones."""
    sampled = int(rollout.loss_mask.sum())
    count = f"{len(rollout.token_ids)}, {sampled} of them "
    text = Text.assemble(("tokens", "bold"), f" ({count}", ("sampled, in ⟦ ⟧", SAMPLED), "): ")
    for trained, start, end in _spans(rollout):
        part = _lines(found.codec.shown(rollout.token_ids[start:end]))
        # Without colours, brackets distinguish them.
        text.append(f"⟦{part}⟧" if trained else part, style=SAMPLED if trained else GIVEN)
    return text


def _spans(rollout: Rollout) -> Iterator[tuple[bool, int, int]]:
    """Yield (mask, start, end) of each run of tokens with equal mask."""
    mask, start = rollout.loss_mask, 0
    for end in range(1, len(mask) + 1):
        if end == len(mask) or mask[end] != mask[start]:
            yield bool(mask[start]), start, end
            start = end
