"""Plugins: discovered from package metadata, imported when named, resolved to one component per name.

A distribution declares an entry point in the group `rlsdk.v1`; its name is the prefix of its components
(`mylab/exact`). A bare name means `core/NAME`. A single file is a plugin named by its stem.
"""

from __future__ import annotations

from rlsdk.plugins.entries import CORE, GROUP, Entry, discover, version
from rlsdk.plugins.fingerprints import Fingerprint, Reference
from rlsdk.plugins.loading import faults_of, load, names
from rlsdk.plugins.manager import Plugins

__all__ = [
    "CORE",
    "GROUP",
    "Entry",
    "Fingerprint",
    "Plugins",
    "Reference",
    "discover",
    "faults_of",
    "load",
    "names",
    "version",
]
