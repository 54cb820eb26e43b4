"""A plugin of rlsdk in one file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import rlsdk
from rlsdk.contracts import Call, Malformed


@rlsdk.tool_parser("my_tool_parser")
class MyToolParser:
    """Calls as lines `CALL NAME {"argument": value}`."""

    begins = ("CALL ",)
    instructions = 'To call a tool, answer with a line CALL NAME {"argument": value}; several lines make several calls.'

    def parse(self, text: str) -> list[Call | Malformed]:
        """Read the lines that are calls; what cannot be read is told to the policy."""
        return [self._call(line.strip()) for line in text.splitlines() if line.startswith("CALL")]

    def _call(self, line: str) -> Call | Malformed:
        _, _, rest = line.partition(" ")
        name, _, written = rest.partition(" ")
        try:
            arguments = json.loads(written)
        except (ValueError, RecursionError) as error:
            return Malformed(f"expected CALL NAME and a JSON object, got {line[:80]!r}: {error}")
        return Call(name, arguments) if isinstance(arguments, dict) else Malformed("expected a JSON object")

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Write one line a call."""
        return "\n".join(f"CALL {name} {json.dumps(dict(arguments))}" for name, arguments in calls)
