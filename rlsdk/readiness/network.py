"""Network checks for `rlsdk doctor`: ports, the hub, logins, the address of a cluster; each takes seconds."""

from __future__ import annotations

import netrc
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from rlsdk import preflight
from rlsdk.cluster.health import unreachable
from rlsdk.readiness.diagnosis import Diagnosis

SECONDS = 2.0
"""Time limit of a connection, and of a name lookup."""
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
RAY_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""File where Ray writes the address of the cluster started on this machine."""


def loopback() -> Diagnosis:
    """Open a port on this machine and connect to it, as actors, engines and servers do."""
    with socket.socket() as server:
        try:
            server.bind(("127.0.0.1", 0))
            server.listen()
            address = f"127.0.0.1:{server.getsockname()[1]}"
            why = unreachable(address, SECONDS)
        except OSError as error:
            address, why = "127.0.0.1", str(error.strerror or error)
    if why:
        remedy = "allow connections to 127.0.0.1: Ray, engines and learners talk over it"
        return Diagnosis(name="loopback", status="fail", found=f"{address}: {why}", remedy=remedy)
    return Diagnosis(name="loopback", status="ok", found="ports on 127.0.0.1 accept connections")


def ray_address() -> Diagnosis:
    """Check that the cluster in RAY_ADDRESS can be reached."""
    named = os.environ.get("RAY_ADDRESS", "")
    if not named or named == "local":
        return Diagnosis(name="Ray cluster", status="ok", found="RAY_ADDRESS is not set; each run starts its own")
    remedy = "start it (ray start --head), or unset RAY_ADDRESS to have Ray started for each run"
    if named == "auto":
        if RAY_CLUSTER.is_file():
            found = f"RAY_ADDRESS=auto, at {RAY_CLUSTER.read_text(encoding='utf-8').strip()}"
            return Diagnosis(name="Ray cluster", status="ok", found=found)
        return Diagnosis(
            name="Ray cluster",
            status="fail",
            found="RAY_ADDRESS=auto, but no cluster runs here",
            remedy=remedy,
        )
    target = named.removeprefix("ray://")
    if not target.rpartition(":")[0] or not target.rpartition(":")[2].isdecimal():
        found = f"RAY_ADDRESS={named} is not an address: expected HOST:PORT, or auto"
        return Diagnosis(name="Ray cluster", status="fail", found=found, remedy=remedy)
    if why := _in_time(target):
        found = f"RAY_ADDRESS={named} cannot be reached: {why}"
        return Diagnosis(name="Ray cluster", status="fail", found=found, remedy=remedy)
    return Diagnosis(name="Ray cluster", status="ok", found=f"RAY_ADDRESS={named} accepts connections")


def hub() -> Diagnosis:
    """Check that models can be downloaded from the hub or its mirror (HF_ENDPOINT), if need be through a proxy."""
    if preflight.hub_is_offline():
        found = "HF_HUB_OFFLINE is set: only models in the cache are found"
        return Diagnosis(name="hub", status="warn", found=found, remedy="unset HF_HUB_OFFLINE to download models")
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxy = next((os.environ[name] for name in PROXIES if os.environ.get(name)), "")
    target = urlsplit(proxy if "//" in proxy else f"//{proxy}") if proxy else endpoint
    address = f"{target.hostname}:{target.port or (443 if target.scheme == 'https' else 80)}"
    by = f" through the proxy {target.hostname}" if proxy else ""
    if why := _in_time(address):
        remedy = "give models and data as folders, or set HF_ENDPOINT (a mirror) or HTTPS_PROXY"
        found = f"{endpoint.hostname}{by} cannot be reached: {why}"
        return Diagnosis(name="hub", status="warn", found=found, remedy=remedy)
    return Diagnosis(name="hub", status="ok", found=f"{endpoint.hostname}{by} accepts connections")


def logins() -> list[Diagnosis]:
    """Look for logins to services, without trying or showing them."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    token = Path(os.environ.get("HF_TOKEN_PATH") or home / "token").expanduser()
    hugging_face = bool(os.environ.get("HF_TOKEN")) or token.is_file()
    wandb = bool(os.environ.get("WANDB_API_KEY"))
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    with suppress(netrc.NetrcParseError, OSError):
        wandb = wandb or (file.is_file() and netrc.netrc(str(file)).authenticators("api.wandb.ai") is not None)
    return [
        _login("Hugging Face", hugging_face, "hf auth login, if a model or data set asks for one"),
        _login("wandb", wandb, "wandb login, for trackers: [wandb]"),
    ]


def _login(service: str, there: bool, remedy: str) -> Diagnosis:
    found = "logged in" if there else "not logged in; most trainings need none"
    return Diagnosis(name=f"login: {service}", status="ok", found=found, remedy="" if there else remedy)


def _in_time(address: str) -> str:
    """Return why an address accepts no connections; the time limit includes the name lookup."""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(unreachable(address, SECONDS)), daemon=True)
    thread.start()
    thread.join(SECONDS + 0.5)
    return answers[0] if answers else f"{address} did not answer within {SECONDS:g} s"
