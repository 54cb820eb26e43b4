"""Changes that a newcomer might want are plugins: examples/plugins, each used as in a run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import rlsdk
from rlsdk.config import check

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "plugins" / "remote_advantage.py"


class Service(BaseHTTPRequestHandler):
    """Returns rewards minus their group's mean, with one number too few for the names in `short`."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        pairs = list(zip(asked["rewards"], asked["groups"], strict=True))
        of_group = {group: [r for r, g in pairs if g == group] for _, group in pairs}
        found = [reward - sum(of_group[group]) / len(of_group[group]) for reward, group in pairs]
        body = json.dumps({"advantages": found[1:] if self.path == "/short" else found}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def service() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def advantage(url: str) -> Any:
    """The advantage that a configuration chooses, ready to run."""
    chosen = {"use": "grpo", "advantage": {"use": "remote_advantage/remote", "url": url}}
    plan = check(ROOT / "examples" / "quickstart.yaml", [f"algorithm={json.dumps(chosen)}"], [FILE])
    return plan.plugins.resolve(plan.advantage)


def inputs() -> rlsdk.CreditInputs:
    rewards, mask = torch.tensor([0.0, 1.0, 4.0, 8.0]), torch.ones(4, 2)
    return rlsdk.CreditInputs.from_padded(rewards=rewards, mask=mask, groups=torch.tensor([0, 0, 1, 1]))


def test_a_remote_service_computes_the_advantage(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert advantage(f"{service}/advantages")(inputs()).tolist() == [-0.5, 0.5, -2.0, 2.0]


def test_a_service_that_answers_too_little_is_an_error(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(ValueError, match="returned 3 advantages for 4 rollouts"):
        advantage(f"{service}/short")(inputs())
