"""Entry point of `python -m rlsdk`, for environments whose scripts are not on the path."""

from __future__ import annotations

from rlsdk.cli import main

if __name__ == "__main__":
    main()
