"""SVG line charts without scripts, with colours from the page's style, readable in print."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import numpy as np

from rlsdk.contracts import Series

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 220, 52, 24
COLOURS = 6
"""Number of the style's line colours, `c0` to `c5`."""


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
    around = {label: band for label, band in (bands or {}).items() if label in shown}
    values = np.concatenate([s.values for s in shown.values()] + [s.values for b in around.values() for s in b])
    steps = np.concatenate([s.steps for s in shown.values()])
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
