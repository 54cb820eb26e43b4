"""Location of a run: a local folder, or a URL with a local folder that mirrors it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

_URL = re.compile(r"[a-z][a-z0-9+.-]*(::[a-z][a-z0-9+.-]*)*://", re.IGNORECASE)
_EXTRAS = {"s3": "rlsdk[s3]", "s3a": "rlsdk[s3]"}
"""Protocol -> rlsdk extra that installs its package."""
FOLDERLESS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "memory"})
"""Protocols of stores without folders, where names contain slashes; creating a folder could create a bucket."""


def is_url(text: str) -> bool:
    """Return whether a string is the URL of a remote folder (`s3://…`) rather than a local path."""
    return _URL.match(text) is not None


def mirror_of(url: str, base: str | None = None) -> Path:
    """Return the local folder that mirrors a remote one, by default in the platform's cache folder."""
    import platformdirs

    root = Path(base).expanduser() if base else platformdirs.user_cache_path("rlsdk") / "runs"
    url = url.rstrip("/")
    words = re.sub(r"[^\w.-]+", "-", url).strip("-")[-60:]
    return root / f"{words}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def url_fault(url: str) -> str:
    """Return why a URL cannot be used on this machine, without connecting; empty if it can."""
    from fsspec.registry import get_filesystem_class

    protocol = url.partition("://")[0].rpartition("::")[2].lower()
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        remedy = f"pip install '{extra}'" if extra else str(error)
        return f"{url} needs a package that is not installed: {remedy}"
    except ValueError:
        return f"{url}: fsspec has no protocol {protocol!r}; it has s3, gs, abfs, sftp, file and others"
    return ""
