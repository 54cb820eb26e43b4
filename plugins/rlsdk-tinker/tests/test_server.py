"""The official client against a real server: engine, learner and HTTP."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from rlsdk_tinker.losses import LOSSES
from tinker import types
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MODEL = ROOT / "examples" / "models" / "countdown-nano"
CONFIG = (EXAMPLES / "server.yaml").read_text().replace("../../../examples/models", str(MODEL.parent))
START = [sys.executable, "-c", "from rlsdk_tinker.command import main; main()"]
PATH = os.pathsep.join([str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATH}
ADAM = types.AdamParams(learning_rate=6e-4)
pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.filterwarnings("ignore::FutureWarning")]


def started(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server, and return it with its address once it serves."""
    (folder / "server.yaml").write_text(CONFIG)
    command = [*START, "server.yaml", f"out={folder}", "--port", "0", "placement.learners=2", *arguments]
    with (folder / "stderr.txt").open("a") as errors:
        server = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True, env=ENVIRONMENT
        )
    assert server.stdout is not None
    line = server.stdout.readline()
    found = re.search(r"TINKER_BASE_URL=(\S+)", line)
    assert found, line + (folder / "stderr.txt").read_text()
    return server, found[1]


def stopped(server: subprocess.Popen[str], number: int = signal.SIGTERM) -> int:
    server.send_signal(number)
    return server.wait(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tinker")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    server, found = started(folder)
    yield found
    assert stopped(server) == 0


@pytest.fixture(scope="module")
def service(address: str) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=address, api_key="tml-local") as client:
        yield client


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model="countdown-nano", rank=8).result()


def datum(prompt: list[int], answer: list[int], **inputs: float) -> types.Datum:
    """A datum with the same value of an input for each token of the answer, and zero for the prompt."""
    tokens, before = prompt + answer, len(prompt) - 1
    arrays = {name: np.array([0.0] * before + [value] * len(answer), np.float32) for name, value in inputs.items()}
    arrays["target_tokens"] = np.array(tokens[1:])
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays)


def example(training: tinker.TrainingClient, **inputs: float) -> types.Datum:
    tokenizer = training.get_tokenizer()
    return datum(tokenizer.encode("3,5,17>9:"), tokenizer.encode("<answer>17-(5+3)</answer>"), **inputs)


def failure(call: Callable[[], Any]) -> str:
    with pytest.raises(tinker.TinkerError) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize(
    ("loss", "inputs"),
    [
        ("cross_entropy", {"weights": 0.7}),
        ("importance_sampling", {"logprobs": -0.4, "advantages": 1.3}),
        ("ppo", {"logprobs": -0.4, "advantages": -0.8}),
        ("cispo", {"logprobs": -0.4, "advantages": 1.3}),
        ("dro", {"logprobs": -0.4, "advantages": 1.3}),
    ],
)
def test_loss_and_gradient_are_those_of_a_plain_model(
    training: tinker.TrainingClient, loss: Any, inputs: Mapping[str, float]
) -> None:
    first, second = example(training, **inputs), datum([6, 111, 8], [9, 10], **inputs)
    # Two requests for one optimiser step add up.
    found = [training.forward_backward([each], loss).result() for each in (first, second)]
    norm = training.optim_step(ADAM).result().metrics["grad_norm:mean"]
    model, total = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), torch.zeros(())
    for each, given in zip(found, (first, second), strict=True):
        targets = torch.tensor(given.loss_fn_inputs["target_tokens"].to_numpy())
        logits = model(torch.tensor([given.model_input.to_ints()])).logits[0]
        logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        assert each.loss_fn_outputs[0]["logprobs"].to_numpy() == pytest.approx(logprobs.detach().numpy(), abs=1e-4)
        arrays = {name: torch.tensor(given.loss_fn_inputs[name].to_numpy()) for name in inputs}
        value = plain(loss, logprobs, arrays)
        assert each.metrics["loss:sum"] == pytest.approx(value.item(), rel=1e-4)
        total = total + value
    total.backward()  # type: ignore[no-untyped-call] # torch declares no types for it
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()
    assert norm == pytest.approx(expected, rel=1e-4)


def plain(name: str, logprobs: torch.Tensor, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The losses as their pages write them, with torch's gradient."""
    if name == "cross_entropy":
        return -(logprobs * arrays["weights"]).sum()
    apart, advantages = logprobs - arrays["logprobs"], arrays["advantages"]
    ratio, clipped = apart.exp(), apart.exp().clamp(0.8, 1.2)
    found = {
        "importance_sampling": ratio * advantages,
        "ppo": torch.minimum(ratio * advantages, clipped * advantages),
        "cispo": clipped.detach() * logprobs * advantages,
        "dro": logprobs * advantages - 0.025 * apart**2,
    }
    assert found.keys() == LOSSES.keys() - {"cross_entropy"}
    return -found[name].sum()


def test_the_example_learns_countdown(training: tinker.TrainingClient) -> None:
    spec = importlib.util.spec_from_file_location("countdown", EXAMPLES / "countdown.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    batches = [[example.TASKS[24 * i + j] for j in range(24)] for i in range(14)]
    rewards = [example.update(training, training.get_tokenizer(), tasks) for tasks in batches]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.1, rewards


def test_a_sampler_and_the_learner_give_the_same_logprobs(training: tinker.TrainingClient) -> None:
    prompt = training.get_tokenizer().encode("3,5,17>9:")
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=12, seed=7)
    first, again = (sampler.sample(types.ModelInput.from_ints(prompt), 2, params).result() for _ in range(2))
    assert [each.tokens for each in first.sequences] == [each.tokens for each in again.sequences]
    sequence = first.sequences[0]
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(prompt + sequence.tokens)).result()
    assert scored[0] is None
    assert scored[len(prompt) :] == pytest.approx(sequence.logprobs, abs=1e-4)


def test_a_custom_loss_trains(training: tinker.TrainingClient) -> None:
    given = example(training, weights=1.0)

    def squared(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = (logprobs[0][8:] ** 2).sum()
        return loss, {"squared": loss.item()}

    before = training.forward_backward_custom([given], squared).result().metrics["squared"]
    training.optim_step(ADAM).result()
    after = training.forward_backward_custom([given], squared).result().metrics["squared"]
    training.optim_step(ADAM).result()
    assert after < before


def test_a_checkpoint_gives_back_weights_and_optimiser(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    given = [example(training, weights=1.0)]

    def steps(client: tinker.TrainingClient) -> list[float]:
        found = []
        for _ in range(3):
            found.append(client.forward_backward(given, "cross_entropy").result().metrics["loss:sum"])
            client.optim_step(ADAM).result()
        return found

    steps(training)
    saved = training.save_state("after-three").result().path
    expected = steps(training)
    training.forward_backward(given, "cross_entropy").result()  # whose gradient is dropped by what follows
    loaded = service.create_training_client_from_state_with_optimizer(saved).result()
    assert steps(loaded) == expected
    assert "another training client has replaced" in failure(lambda: training.forward(given, "cross_entropy").result())


def test_named_weights_are_exported_and_sampled(
    service: tinker.ServiceClient, training: tinker.TrainingClient, folder: Path
) -> None:
    path = training.save_weights_for_sampler("model").result().path
    exported = folder / "tinker" / "tinker" / "sampler_weights" / "model"
    assert AutoModelForCausalLM.from_pretrained(exported).config.vocab_size == 120
    sampler = service.create_sampling_client(model_path=path).result()
    prompt = types.ModelInput.from_ints(training.get_tokenizer().encode("3,5,17>9:"))
    found = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=3)).result().sequences[0]
    assert (len(found.tokens), found.stop_reason) == (3, "length")


def test_a_sampler_of_weights_that_the_engines_no_longer_have_is_refused(training: tinker.TrainingClient) -> None:
    prompt, params = types.ModelInput.from_ints([6, 111]), types.SamplingParams(max_tokens=2)
    old = training.save_weights_and_get_sampling_client().result()
    newest = training.save_weights_and_get_sampling_client(kind="inflight").result()
    training.forward_backward([example(training, weights=1.0)], "cross_entropy").result()
    training.optim_step(ADAM).result()
    assert "newer than this sampler's" in failure(lambda: old.compute_logprobs(prompt).result())
    training.save_weights_and_get_sampling_client().result()
    assert "the server holds one version" in failure(lambda: old.sample(prompt, 1, params).result())
    assert newest.sample(prompt, 1, params).result().sequences


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"loss": "gspo"}, "unknown loss_fn 'gspo'; this server has cross_entropy"),
        ({"loss": "ppo"}, "loss_fn 'ppo' reads target_tokens, logprobs, advantages; got 'weights', too"),
        ({"options": {"clip": 0.1}}, "got the option 'clip'; it has no options"),
        ({"weights": float("nan")}, "datum 0: weights has values that are not finite"),
        ({"answer": [120]}, "datum 0: the model has no token 120; it has 120 tokens"),
        ({"answer": [7] * 40}, "datum 0: 43 tokens with the last target; the server's model.max_length is 32"),
        ({"inputs": [6, 6]}, "target 0 is 111, but the next token of model_input is 6"),
        ({"inputs": [6]}, "datum 0: target_tokens has 3 values for 1 tokens of model_input"),
    ],
)
def test_faults_of_data_are_told_and_the_server_continues(
    training: tinker.TrainingClient, change: Mapping[str, Any], told: str
) -> None:
    made = datum([6, 111, 8], change.get("answer", [9]), weights=change.get("weights", 1.0))
    if "inputs" in change:
        made = types.Datum(
            model_input=types.ModelInput.from_ints([*change["inputs"], 8][: 3 if len(change["inputs"]) > 1 else 1]),
            loss_fn_inputs=made.loss_fn_inputs,
        )
    options, loss = change.get("options"), change.get("loss", "cross_entropy")
    assert told in failure(lambda: training.forward_backward([made], loss, options).result())
    assert training.forward([datum([6, 111], [8], weights=1.0)], "cross_entropy").result().loss_fn_outputs


def test_faults_of_other_requests_are_told(service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    def told(call: Callable[[], Any]) -> str:
        return failure(call)

    other = types.AdamParams(learning_rate=1e-3, eps=1e-8)
    assert "start the server with learner.eps=" in told(lambda: training.optim_step(other).result())
    assert "cannot name a checkpoint" in told(lambda: training.save_state("../up").result())
    create = service.create_training_client_from_state_with_optimizer
    assert "there is no checkpoint" in told(lambda: create("tinker://tinker/weights/none").result())
    other_model = service.create_lora_training_client
    assert "the client asked for Qwen" in told(lambda: other_model(base_model="Qwen/Qwen3-8B", rank=8).result())
    training.forward_backward([example(training, weights=1.0)], "cross_entropy").result()
    assert "call optim_step first" in told(lambda: training.save_state("pending").result())
    sampler = training.save_weights_and_get_sampling_client().result()
    long = types.ModelInput.from_ints([6] * 40)
    assert "the prompt has 40 tokens" in told(lambda: sampler.sample(long, 1, types.SamplingParams()).result())


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("tml-any", 404)])
def test_a_request_without_a_key_is_refused_as_web_pages_send_it(address: str, key: str | None, status: int) -> None:
    request = urllib.request.Request(f"{address}/api/v1/nothing", b"{}", {} if key is None else {"X-API-Key": key})
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request)
    assert raised.value.code == status
    assert json.load(raised.value)["detail"]


def test_a_server_whose_learner_is_killed_tells_the_client_and_ends(tmp_path: Path) -> None:
    server, address = started(tmp_path)
    try:
        service = tinker.ServiceClient(base_url=address, api_key="tml-local")
        training = service.create_lora_training_client(base_model="countdown-nano", rank=8).result()
        for process in Path("/proc").glob("[0-9]*"):
            if b"LearnerActor" in command_of(process) and writes_into(process, tmp_path):
                os.kill(int(process.name), signal.SIGKILL)
        told = failure(lambda: training.forward([example(training, weights=1.0)], "cross_entropy").result())
        assert "the server ends: " in told
        assert server.wait(60) == 1
    finally:
        server.kill()
    assert "rlsdk-tinker: " in (tmp_path / "stderr.txt").read_text()


def command_of(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def writes_into(process: Path, folder: Path) -> bool:
    """True if a process has an open file below a folder, as the server's actors have their logs."""
    try:
        return any(str(folder) in os.readlink(each) for each in (process / "fd").iterdir())
    except OSError:
        return False


@pytest.mark.parametrize(
    ("more", "arguments", "told"),
    [
        ("reward: countdown", [], "reward: the client decides on this"),
        ("", ["sampling.temperature=0.5"], "sampling: the client decides on this"),
        ("", ["--host", "0.0.0.0"], "set TINKER_API_KEY"),
        ("learner: {lora: {rank: 0}}", [], "learner.lora.rank: expected int >= 1, got 0"),
    ],
)
def test_a_server_that_cannot_start_says_why(tmp_path: Path, more: str, arguments: list[str], told: str) -> None:
    (tmp_path / "server.yaml").write_text(f"model: {{path: {MODEL}, max_length: 32}}\n{more}\n")
    command = [*START, "server.yaml", *arguments]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert ran.returncode == 2
    assert told in ran.stderr
