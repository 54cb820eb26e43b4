"""Self-contained HTML pages and SVG charts without scripts or network links; all content is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from rlsdk.contracts import Series
from rlsdk.errors import visible

STYLE = """
:root { color-scheme: light dark; --c0:#2563eb; --c1:#d97706; --c2:#059669; --c3:#db2777; --c4:#7c3aed; --c5:#0891b2 }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; background: Canvas;
  color: CanvasText }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2rem; border-bottom: 1px solid #8886 }
pre { overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; padding: .6rem;
  font-size: .85rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .9rem; width: 100% }
td, th { text-align: left; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid #8883; vertical-align: top;
  overflow-wrap: anywhere } th { overflow-wrap: normal }
figure { margin: 1rem 0 } svg { width: 100%; height: auto } polyline { fill: none; stroke-width: 2 }
svg text { font-size: 11px; fill: currentColor } .band { stroke: none; opacity: .18 } .key { margin-left: 1em }
.key::before { content: ""; display: inline-block; width: 1em; margin-right: .4em; vertical-align: .25em;
  border-top: 3px solid }
.critical { color: #dc2626; font-weight: 600 } .warning { color: #b45309; font-weight: 600 }
@media (prefers-color-scheme: dark) { .critical { color: #f87171 } .warning { color: #fbbf24 } }
@media print { body { max-width: none; font-size: 11px } section, figure, tr { break-inside: avoid } }
"""
STYLE += "".join(
    f"polyline.c{i}{{stroke:var(--c{i})}} .band.c{i}{{fill:var(--c{i})}} "
    f".key.c{i}::before{{border-color:var(--c{i})}}\n"
    for i in range(6)
)
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 220, 52, 24
COLOURS = 6
"""Number of the style's line colours, `c0` to `c5`."""


def page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """Return a page of sections, each a heading and its HTML; empty sections are omitted."""
    body = "".join(
        f"<section><h2>{escape(heading)}</h2>{content}</section>" for heading, content in sections if content
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def escaped(value: Any) -> str:
    """Return a value as text for a page: HTML is escaped, and control characters are shown as escapes."""
    return escape(visible(str(value), keep="\n\t"))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table of plain values; empty if there are no rows."""
    lines = ["".join(f"<td>{escaped(value)}</td>" for value in row) for row in rows]
    if not lines:
        return ""
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="wide"><table><tr>{titles}</tr>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def text_block(text: str) -> str:
    """Return text as a preformatted block; empty for an empty text."""
    return f"<pre>{escaped(text)}</pre>" if text else ""


def _thinned(series: Series) -> Series:
    """Average neighbouring values of a long curve: with several per pixel it would be a block of colour."""
    width = -(-len(series) // WIDTH)
    if width <= 1:
        return series
    starts = np.arange(0, len(series), width)
    ends = np.append(starts[1:], len(series))
    return Series(series.steps[ends - 1], np.add.reduceat(series.values, starts) / (ends - starts), series.name)


def chart(title: str, curves: Mapping[str, Series], bands: Mapping[str, tuple[Series, Series]] | None = None) -> str:
    """Return a chart of metrics over the steps; empty if none of them has two values.

    Args:
        title: Title above the chart.
        curves: Label -> values.
        bands: Label -> lower and upper values around a curve, over the same steps.
    """
    shown = {label: series for label, series in curves.items() if len(series) > 1}
    if not shown:
        return ""
    steps = np.concatenate([s.steps for s in shown.values()])
    shown = {label: _thinned(series) for label, series in shown.items()}
    around = {label: [_thinned(s) for s in band] for label, band in (bands or {}).items() if label in shown}
    values = np.concatenate([s.values for s in shown.values()] + [s.values for b in around.values() for s in b])
    low, high = float(values.min()), float(values.max())
    high = high if high > low else low + 1.0
    left, right = int(steps.min()), int(steps.max())

    def points(series: Series) -> list[str]:
        x = LEFT + (series.steps - left) / max(right - left, 1) * (WIDTH - LEFT - 8)
        y = 8 + (high - series.values) / (high - low) * (HEIGHT - BOTTOM - 16)
        return [f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True)]

    lines = []
    for i, (label, series) in enumerate(shown.items()):
        colour = f"c{i % COLOURS}"
        if label in around:
            lower, upper = around[label]
            lines.append(f'<polygon class="{colour} band" points="{" ".join(points(lower) + points(upper)[::-1])}"/>')
        lines.append(f'<polyline class="{colour}" points="{" ".join(points(series))}"/>')
    key = " ".join(f'<span class="key c{i % COLOURS}">{escape(label)}</span>' for i, label in enumerate(shown))
    axis = "".join(
        f'<text x="{LEFT - 6}" y="{y}" text-anchor="end">{value:.3g}</text>'
        for y, value in ((14, high), (HEIGHT - BOTTOM - 4, low))
    )
    axis += f'<text x="{LEFT}" y="{HEIGHT - 6}">{left}</text>'
    axis += f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">step {right}</text>'
    picture = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(lines)}{axis}</svg>'
    )
    return f"<figure><figcaption>{escape(title)} {key}</figcaption>{picture}</figure>"
