"""Line charts as PNG files, for slides and chats that take no HTML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlsdk.contracts import Series
from rlsdk.errors import EnvironmentFault, install_command


def draw(path: Path, title: str, curves: Mapping[str, Series]) -> bool:
    """Draw metrics over the steps into a file; False if none has two values.

    Args:
        path: File to write; it is whole or not there.
        title: Title above the chart.
        curves: Label -> values.

    Raises:
        EnvironmentFault: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    shown = {label: series for label, series in curves.items() if len(series) > 1}
    if not shown:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentFault(f"pictures need matplotlib: {install_command(error)}") from error
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for label, series in shown.items():
        axes.plot(series.steps, series.values, label=label, linewidth=1.2)
    axes.set(xlabel="step")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    passing = path.with_suffix(".png.part")
    figure.savefig(passing, dpi=120, format="png")
    passing.replace(path)
    return True
