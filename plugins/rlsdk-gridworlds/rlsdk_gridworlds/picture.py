"""Draw pictures of a grid with numpy only."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np

from rlsdk.errors import ValueFault

TILE = 32
"""Side length of a cell in pixels."""
_GROUND: dict[str, tuple[int, int, int]] = {
    "wall": (92, 84, 80),
    "hole": (28, 52, 92),
    "player in hole": (28, 52, 92),
}
_FLOOR = (226, 236, 242)
_EDGE = (198, 210, 218)
_TARGET = (214, 72, 62)
_GOAL = (52, 150, 84)
_BOX = (186, 132, 70)
_BOX_ON_TARGET = (52, 150, 84)
_PLAYER = (48, 98, 190)


SHOWN = {
    "player": "a blue disc",
    "empty": "light",
    "wall": "grey",
    "hole": "dark blue",
    "goal": "a green square",
    "target": "a red diamond",
    "box": "a brown square",
    "box on target": "a green square",
}
"""Kind of cell -> its appearance; combined kinds, such as a player on a target, show both."""


def draw(cells: Sequence[Sequence[str]]) -> np.ndarray:
    """Draw a picture of a grid.

    Args:
        cells: Content of each cell, row by row, such as `wall` or `player on target`.

    Returns:
        uint8 `[height, width, 3]`, with 32 × 32 pixels per cell.
    """
    return np.concatenate([np.concatenate([_tile(cell) for cell in row], axis=1) for row in cells], axis=0)


def _tile(cell: str) -> np.ndarray:
    tile = np.empty((TILE, TILE, 3), np.uint8)
    tile[:] = _EDGE
    tile[1:, 1:] = _GROUND.get(cell, _FLOOR)
    y, x = np.mgrid[:TILE, :TILE] - (TILE - 1) / 2
    disc, square, diamond = x**2 + y**2, np.maximum(abs(x), abs(y)), abs(x) + abs(y)
    if cell in ("target", "player on target", "box on target"):
        tile[diamond <= 13] = _TARGET
    if cell in ("goal", "player on goal"):
        tile[square <= 12] = _GOAL
    if cell in ("box", "box on target"):
        tile[square <= 10] = _BOX if cell == "box" else _BOX_ON_TARGET
    if cell.startswith("player"):
        tile[disc <= (6 if cell == "player in hole" else 8) ** 2] = _PLAYER
    return tile


def save_png(picture: np.ndarray, path: str | PathLike[str]) -> None:
    """Write a picture as a PNG file.

    Args:
        picture: uint8 `[height, width, 3]`, as `render("rgb_array")` returns it.
        path: Target file.

    Raises:
        ValueFault: The picture has another shape or dtype.
    """
    Path(path).write_bytes(to_png(picture))


def to_png(picture: np.ndarray) -> bytes:
    """Return the bytes of a PNG file.

    Args:
        picture: uint8 `[height, width, 3]`.

    Raises:
        ValueFault: The picture has another shape or dtype.
    """
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        raise ValueFault(f"a picture must be uint8 [height, width, 3]; got {picture.dtype} {list(picture.shape)}")
    height, width, _ = picture.shape
    rows = b"".join(b"\0" + row.tobytes() for row in picture)  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits per channel, RGB
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
