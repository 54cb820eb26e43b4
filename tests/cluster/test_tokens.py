"""Ray's token: a server that answers like a GCS, and the settings of each machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from rlsdk.cluster.address import RayAddress, RayToken, access, token_fault
from rlsdk.errors import RunError

SECRET = "5e" * 32


class Gcs(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers `GetClusterId`, and refuses callers without its token."""

    def __init__(self, token: str) -> None:
        self._token = token

    def service(self, details: Any) -> Any:
        shown = dict(details.invocation_metadata).get("authorization", "")

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self._token and shown != f"Bearer {self._token}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b"\x12\x02id"

        return grpc.unary_unary_rpc_method_handler(answer) if details.method.endswith("/GetClusterId") else None


def serving(token: str) -> Iterator[str]:
    """Address of such a server."""
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([Gcs(token)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def closed() -> Iterator[str]:
    """A cluster that requires a token."""
    yield from serving(SECRET)


@pytest.fixture
def open_cluster() -> Iterator[str]:
    """A cluster that requires none."""
    yield from serving("")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home folder without a token, and an environment that says nothing; returns the place of its token."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "x")  # so that the mode which a test sets is gone after it
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".ray").mkdir()
    return tmp_path / ".ray" / "auth_token"


def test_access_tells_open_granted_refused_and_unknown(closed: str, open_cluster: str) -> None:
    assert access(open_cluster) == "open"
    assert (access(closed), access(closed, SECRET), access(closed, "wrong")) == ("refused", "granted", "refused")
    assert access("127.0.0.1:1") == "unknown"


def test_a_cluster_is_asked_past_the_proxy_of_the_environment(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    assert (access(closed), access(closed, SECRET)) == ("refused", "granted")


def test_a_cluster_without_token_is_joined_without_token_even_if_one_lies_here(open_cluster: str, home: Path) -> None:
    home.write_text(SECRET)
    assert token_fault(open_cluster) == ""
    assert "RAY_AUTH_MODE" not in os.environ


def test_token_mode_is_refused_where_the_cluster_requires_none(
    open_cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert token_fault(open_cluster).startswith("requires no token, but with RAY_AUTH_MODE=token this process would")


def test_the_right_token_switches_the_mode_on(closed: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray  # noqa: F401 - the mode must hold although Ray is imported
    from ray._raylet import AuthenticationMode, Config, get_authentication_mode  # type: ignore[attr-defined]

    home.write_text(f"{SECRET}\n")
    assert token_fault(closed) == ""
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert get_authentication_mode() == AuthenticationMode.TOKEN
    monkeypatch.delenv("RAY_AUTH_MODE")
    Config.initialize("")
    assert get_authentication_mode() != AuthenticationMode.TOKEN


def test_a_missing_token_names_the_file_to_copy_and_its_place(closed: str, home: Path) -> None:
    with pytest.raises(RunError) as caught:
        RayAddress(closed, "placement.ray").join()
    assert str(caught.value) == (
        f"the Ray cluster {closed!r}, set by placement.ray, requires a token, and {home} does not exist: copy "
        "the first machine's token (there: `ray get-auth-token`, or the file ~/.ray/auth_token) "
        f"to {home} on this machine"
    )


def test_a_wrong_token_names_where_it_came_from(closed: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.write_text("wrong")
    assert f"requires another token than the one from {home}: copy" in token_fault(closed)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "also wrong")
    assert RayToken.find().text == "also wrong"
    assert "requires another token than the one from the environment variable RAY_AUTH_TOKEN" in token_fault(closed)


def test_a_mode_that_forbids_tokens_is_named(closed: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.write_text(SECRET)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert token_fault(closed).startswith("requires a token, but RAY_AUTH_MODE=disabled prevents sending one")
