"""What `tools/install.py` tells uv of pip's configuration."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

INSTALL: dict[str, Any] = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "install.py"))


def test_uv_is_given_what_pip_is_configured_with():
    configured = r"""
:env:.config-file='/pip.conf'
:env:.index-url='https://f.example/simple'
global.cert='/certificates.crt'
global.constraint='/constraints.txt'
global.extra-index-url='\nhttps://b.example/simple\nfile:///c'
global.find-links='/d /e'
global.index-url='https://a.example/simple'
global.timeout='60'
"""
    assert INSTALL["uv_variables"](configured.strip()) == {
        "UV_DEFAULT_INDEX": "https://f.example/simple",  # pip's environment variables override its files
        "UV_INDEX": "https://b.example/simple file:///c",
        "UV_FIND_LINKS": "/d,/e",
        "UV_CONSTRAINT": "/constraints.txt",
        "SSL_CERT_FILE": "/certificates.crt",
    }


@pytest.mark.parametrize(
    "line", ["global.trusted-host='a.example'", "install.no-index='true'", ":env:.proxy='https://a'"]
)
def test_pip_is_used_if_its_configuration_says_what_uv_cannot_be_told(line):
    assert INSTALL["uv_variables"](f"global.timeout='60'\n{line}\n") is None
