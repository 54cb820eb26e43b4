"""An advantage computed by a remote service: it receives rewards and groups as JSON and returns a number per rollout.

A single-file plugin, used without changing rlsdk:

    rlsdk train examples/quickstart.yaml --plugin examples/plugins/remote_advantage.py \
        'algorithm.advantage={use: remote_advantage/remote, url: "http://127.0.0.1:8000/advantages"}'
"""

from __future__ import annotations

import json
import urllib.request

import torch

import rlsdk


@rlsdk.advantage("remote")
def remote(x: rlsdk.CreditInputs, *, url: str, timeout: float = 30.0) -> torch.Tensor:
    """Request the advantage of each rollout from a service.

    It receives `{"rewards": […], "groups": […]}` and returns `{"advantages": […]}`, all of the same length. Advantages
    run in a thread, so that waiting for the service blocks nothing else.

    Args:
        url: Address of the service.
        timeout: Seconds to wait for an answer.
    """
    body = json.dumps({"rewards": x.rewards.tolist(), "groups": x.groups.tolist()}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        found = json.load(reply)["advantages"]
    if len(found) != len(x.rewards):
        raise ValueError(f"{url} returned {len(found)} advantages for {len(x.rewards)} rollouts")
    return x.rewards.new_tensor(found)
