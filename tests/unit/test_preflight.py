"""The checks of the machine, with real distributions, folders and programs created for each test."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path
from threading import Thread

import pytest

from rlsdk import preflight
from rlsdk.errors import EnvironmentFault


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that puts a distribution's metadata where importlib finds it first, and nothing else there."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def put(name: str, version: str) -> None:
        folder = tmp_path / f"{name}-{version.replace('-', '_')}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return put


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("https://localhost/v1", True),
        ("http://[::1]:8000/v1", True),
        ("http://127.0.0.1.example.com/v1", False),
        ("https://localhost.example.com/v1", False),
        ("https://api.example.com/v1", False),
    ],
)
def test_a_url_of_this_machine_is_told_from_others(url: str, here: bool):
    assert preflight.is_loopback(url) is here


def test_cuda_companions_of_a_cpu_torch_are_named_with_the_remedy(install):
    install("torch", "2.13.0+cpu")
    install("torchvision", "0.28.0")
    install("torchcodec", "0.17.0+cu130")
    vision, codec = preflight.torch_companions()
    assert vision.startswith("torchvision 0.28.0 is built for CUDA, but torch 2.13.0+cpu is not")
    assert "operator torchvision::nms does not exist" in vision
    assert vision.endswith("pip uninstall -y torchvision torchaudio torchcodec triton")
    assert codec.startswith("torchcodec 0.17.0+cu130")


def test_cpu_companions_of_a_cpu_torch_are_not_a_fault(install):
    install("torch", "2.13.0+cpu")
    install("torchvision", "0.28.0+cpu")
    install("torchaudio", "2.11.0+cpu")
    assert preflight.torch_companions() == []


@pytest.mark.parametrize("version", ["2.13.0", "2.11.0+cu130"])
def test_a_torch_for_cuda_takes_the_companions_of_the_public_index(install, version):
    install("torch", version)
    install("torchvision", "0.28.0")
    assert preflight.torch_companions() == []


def test_without_torch_there_is_nothing_to_compare(install):
    install("torchvision", "0.28.0")
    assert preflight.torch_companions() == []


def test_looking_for_companions_imports_no_torch():
    code = "import sys; from rlsdk import preflight; preflight.torch_companions(); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_this_environment_has_no_misfits():
    if not metadata.version("torch").endswith("+cpu"):
        pytest.skip("not the CPU environment that `make` installs")
    assert preflight.torch_companions() == []


def test_a_folder_that_may_not_be_written_to_is_reported(tmp_path, monkeypatch):
    access = os.access  # root may write everywhere, except to read-only disks
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    (fault,) = preflight.free_space(tmp_path / "runs" / "mine", 1)
    assert fault == f"{tmp_path}/runs/mine cannot be written: you may not write to {tmp_path}; choose another folder"


def test_a_limit_of_file_sizes_below_the_object_store_is_reported():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        (fault,) = preflight.file_size()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "files of at most 1 MiB" in fault and "ulimit -f unlimited" in fault


def test_space_is_measured_where_a_folder_will_be(tmp_path):
    folder = tmp_path / "runs" / "not-yet"
    assert preflight.free_space(folder, 1) == []
    (fault,) = preflight.free_space(folder, 2**60)
    assert str(folder) in fault
    assert "1.049e+06 TiB are needed" in fault
    assert not folder.exists()
    (tmp_path / "file").touch()
    (fault,) = preflight.free_space(tmp_path / "file" / "runs", 1)
    assert fault.endswith("file is a file; choose another folder")


@pytest.mark.parametrize(
    ("capability", "built"),
    [
        ((9, 0), ["sm_80", "sm_90"]),
        ((8, 6), ["sm_80"]),
        ((8, 9), ["compute_80"]),
        ((12, 0), ["compute_90"]),
        ((9, 0), ["sm_90a"]),
        ((12, 0), ["sm_90", "sm_120"]),
        ((10, 3), ["sm_100f"]),
        ((9, 4), ["gfx942"]),
    ],
)
def test_devices_that_a_build_serves(capability, built):
    assert preflight.arch_fault("Some GPU", capability, built) == ""


@pytest.mark.parametrize(
    ("capability", "built"),
    [
        ((7, 0), ["sm_80", "sm_90", "compute_90"]),
        ((9, 0), ["sm_80"]),
        ((8, 0), ["sm_86"]),
        ((10, 3), ["sm_90", "sm_100a"]),
        ((8, 9), ["sm_90a"]),
        ((9, 0), []),
    ],
)
def test_devices_that_a_build_does_not_serve(capability, built):
    fault = preflight.arch_fault("Some GPU", capability, built)
    major, minor = capability
    assert fault.startswith(f"Some GPU has compute capability {major}.{minor}, but this torch was built for ")
    assert "Install a build of torch" in fault


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (5 * 2**29, "2.5 GiB"), (3 * 2**50, "3072 TiB")],
)
def test_sizes_are_written_for_people(count, text):
    assert preflight.size_text(count) == text


@pytest.mark.gpu
def test_this_gpu_is_served():
    assert preflight.gpu_capability() == []


def test_no_gpu_is_not_a_fault():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert preflight.gpu_capability() == []


def test_require_lists_every_fault():
    preflight.require([])
    with pytest.raises(EnvironmentFault) as caught:
        preflight.require(["no compiler", "no space"])
    assert str(caught.value).splitlines()[1:] == ["  - no compiler", "  - no space"]


def test_a_package_that_an_option_needs_is_named(install):
    install("there", "1.0")
    assert preflight.packages(["there", "absent"], "learner x with these options") == [
        "learner x with these options needs absent, which is not installed: pip install absent"
    ]


def test_a_program_that_an_option_needs_is_named():
    assert preflight.programs([sys.executable, "no-such-program"], "learner x with these options") == [
        "learner x with these options starts no-such-program, which is not on this machine's PATH: install it"
    ]


ASKED = """
import json, os
from huggingface_hub import constants
from rlsdk import preflight

print(json.dumps([preflight.hub_model(name) for name in ("lab/there", "lab/absent")]))
print(json.dumps([preflight.hub_is_offline(), os.environ.get("HF_HUB_OFFLINE")]))
"""


@pytest.mark.parametrize("answers", [False, True])
def test_a_hub_that_does_not_answer_is_asked_only_once(tmp_path: Path, answers: bool) -> None:
    model = tmp_path / "hub" / "models--lab--there"
    (model / "snapshots" / "1").mkdir(parents=True)
    (model / "snapshots" / "1" / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("1")
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            if answers:
                self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
        ran = subprocess.run([sys.executable, "-c", ASKED], env=environment, capture_output=True, text=True, check=True)
        server.shutdown()
    there, absent = json.loads(ran.stdout.splitlines()[0])
    assert there == []
    assert "the hub model of that name is not in this machine's cache" in absent[0]
    paths = ["/lab/there/resolve/main/config.json", "/lab/absent/resolve/main/config.json"]
    assert asked == (paths if answers else paths[:1])
    assert json.loads(ran.stdout.splitlines()[1]) == ([False, None] if answers else [True, "1"])
    assert ("does not answer" in ran.stderr) is not answers


def test_the_url_of_a_server_on_all_addresses_names_one_that_can_be_opened() -> None:
    assert preflight.url_host("0.0.0.0").count(".") == 3 and preflight.url_host("0.0.0.0") != "0.0.0.0"
    assert preflight.url_host("::").strip("[]") not in ("", "::")
    assert [preflight.url_host(host) for host in ("127.0.0.1", "::1", "10.0.0.7")] == ["127.0.0.1", "[::1]", "10.0.0.7"]


def test_without_a_network_the_url_is_that_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr("socket.socket.connect", unreachable)
    assert (preflight.url_host("0.0.0.0"), preflight.url_host("::")) == ("127.0.0.1", "[::1]")
