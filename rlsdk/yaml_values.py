"""YAML values as configurations read them: `1e-6` is a number, which plain YAML 1.1 takes for text."""

from __future__ import annotations

import re
from typing import Any

import yaml


class ValueLoader(yaml.SafeLoader):
    """Safe YAML loader that reads 1e-6 as a number, as Hydra and OmegaConf do."""


ValueLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+"), list("-+0123456789")
)


def load_value(text: str) -> Any:
    """Parse a value given on the command line, such as the one of `--option key=value`.

    Raises:
        yaml.YAMLError: The text is not YAML.
    """
    return yaml.load(text, ValueLoader)
