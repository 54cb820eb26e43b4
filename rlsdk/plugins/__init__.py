"""Plugins: discovered from package metadata, imported when named, with one component per name.

A distribution declares an entry point in the group `rlsdk.v1`; its name is the prefix of its components
(`mylab/exact`). A bare name means `core/NAME`. A single file is a plugin named by its stem.
"""

from __future__ import annotations

from rlsdk.plugins.discovery import CORE, GROUP, PluginEntry, discover, misspelt_group, short_name, version
from rlsdk.plugins.fingerprints import ComponentRef, Fingerprint
from rlsdk.plugins.loading import faults_of, load, names
from rlsdk.plugins.manager import Plugins
from rlsdk.plugins.own_parts import with_own_parts

__all__ = [
    "CORE",
    "GROUP",
    "ComponentRef",
    "Fingerprint",
    "PluginEntry",
    "Plugins",
    "discover",
    "faults_of",
    "load",
    "misspelt_group",
    "names",
    "short_name",
    "version",
    "with_own_parts",
]
