"""Remote folders: in memory, on this disk, and on an S3 server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The endpoint of a server of S3 on this machine, which the environment names, with one bucket."""
    server_of = pytest.importorskip("moto.server").ThreadedMotoServer
    pytest.importorskip("s3fs")
    import s3fs

    server = server_of(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        named = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }
        for name, value in {**named, "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield f"http://{host}:{port}"
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a folder that is not there yet, on each kind of store."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/runs/trial"
    if request.param == "file":
        return f"file://{tmp_path}/remote/runs/trial"
    request.getfixturevalue("s3")
    return f"s3://bucket/{uuid.uuid4().hex}/runs/trial"


@pytest.fixture
def memory() -> str:
    """URL of a folder that is not there yet, in memory."""
    return f"memory://{uuid.uuid4().hex}/runs/trial"
