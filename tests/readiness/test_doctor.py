"""`rlsdk doctor` on this machine, and on machines with something missing."""

from __future__ import annotations

import json
import re
import resource
import socket
import subprocess
import sys
import sysconfig
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import constants
from packaging.requirements import Requirement

from rlsdk.cli import root
from rlsdk.readiness import doctor
from tests.ports import free_port


def diagnosed(name: str) -> doctor.Diagnosis:
    (found,) = (each for each in doctor.diagnose() if each.name == name)
    return found


@pytest.fixture
def closed_port() -> str:
    return f"127.0.0.1:{free_port()}"


def test_every_check_says_what_it_found_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ran = CliRunner().invoke(root, ["doctor", "--json"])
    checks = json.loads(ran.stdout)["checks"]
    names = [each["name"] for each in checks]
    assert {"python", "torch", "ray", "gpu", "C++ compiler", "open files", "sandbox", "loopback"} <= set(names)
    assert len(names) == len(set(names))
    for each in checks:
        assert set(each) == {"name", "ok", "status", "found", "remedy"} and each["found"]
        assert each["status"] == "ok" or each["remedy"]
    assert ran.exit_code == (0 if all(each["ok"] for each in checks) else 1)


def test_at_80_columns_lines_wrap_below_what_they_continue() -> None:
    wide = CliRunner().invoke(root, ["doctor"]).output
    ran = CliRunner().invoke(root, ["doctor"], env={"COLUMNS": "80"})
    lines = ran.output.splitlines()
    assert [line for line in lines if len(line) > 80 and " " in line.strip()] == []
    assert len(lines) >= len(wide.splitlines())
    assert all(re.match(r"(ok|warn|fail) +\S|\d+ checks| {10}|$", line) for line in lines)


def test_it_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys, rlsdk.readiness.doctor as d; d.diagnose()\n"
        "print(sorted({'torch', 'ray', 'vllm', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_an_address_without_a_cluster_fails_with_a_remedy(monkeypatch: pytest.MonkeyPatch, closed_port: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", closed_port)
    ran = CliRunner().invoke(root, ["doctor"], env={"COLUMNS": "200"})
    assert ran.exit_code == 1
    assert f"RAY_ADDRESS={closed_port} cannot be reached: Connection refused" in ran.output
    assert "unset RAY_ADDRESS" in ran.output


@pytest.mark.parametrize(("address", "words"), [("somewhere", "is not an address"), ("host:port", "is not an address")])
def test_an_address_that_is_none_fails(monkeypatch: pytest.MonkeyPatch, address: str, words: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert doctor.ray_address().status == "fail" and words in doctor.ray_address().found


def test_few_open_files_fail() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    try:
        found = doctor.open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.status == "fail" and found.found.startswith("1000 ") and found.remedy.startswith("ulimit -n ")


def test_another_version_than_the_tested_one_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_requirements", lambda _: {"transformers": Requirement("transformers<1")})
    (found,) = (each for each in doctor.versions() if each.name == "transformers")
    assert found.status == "warn" and "tested with <1" in found.found and "pip install 'rlsdk[" in found.remedy


def test_a_gpu_beside_a_build_of_torch_for_cpus_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 570.10, 143771 MiB'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor, "cuda_of_torch", lambda: "")
    found = diagnosed("gpu")
    assert found.status == "warn" and "NVIDIA H200" in found.found and "built for CPUs" in found.found


@pytest.mark.parametrize(
    ("driver", "visible", "why"),
    [
        ("570.10", None, "the driver 570.10 is older than 580.65.06, the oldest for CUDA 13.0"),
        ("580.82.07", "", "CUDA_VISIBLE_DEVICES is ''"),
        ("580.82.07", None, "in a container, libcuda.so.1 of the driver may be missing"),
        ("[N/A]", None, "in a container"),
    ],
)
def test_a_gpu_that_torch_does_not_see_fails_with_the_reason(
    driver: str, visible: str | None, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho 'NVIDIA H200, {driver}, 143771 MiB'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor, "cuda_of_torch", lambda: "13.0")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = diagnosed("gpu")
    assert found.status == "fail" and "update the driver" in found.remedy
    assert f"torch (CUDA 13.0) sees no GPU; {why}" in found.found


def test_a_torch_for_amd_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "version.py").write_text("cuda: Optional[str] = None\nhip: Optional[str] = '7.0.51831'\n")
    spec = spec_from_file_location("torch", package / "__init__.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec if name == "torch" else None)
    found = diagnosed("gpu")
    assert (found.status, found.found) == ("warn", "torch is for ROCm 7.0.51831")
    assert "never run on AMD GPUs" in found.remedy


TOPOLOGY = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \t{0}\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\t{0}\t X \tSYS\tNODE\t0-47\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


@pytest.mark.parametrize(
    ("link", "found"),
    [("NV18", "2 pairs by SYS, 1 pair by NV18 (NV: NVLink)"), ("PIX", "2 pairs by SYS, 1 pair by PIX (no NVLink")],
)
def test_links_of_gpus_are_counted(link: str, found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "topology").write_text(TOPOLOGY.format(link))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat '{tmp_path}/topology'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert diagnosed("GPU links").found.startswith(found)


def test_one_gpu_has_no_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '\\tGPU0\\tCPU Affinity\\nGPU0\\t X \\t0-3\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert "GPU links" not in [each.name for each in doctor.diagnose()]


def test_what_triton_compiles_with_is_checked_where_torch_is_for_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert "Triton" not in [each.name for each in doctor.diagnose()]
    monkeypatch.setattr(doctor, "cuda_of_torch", lambda: "13.0")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    (tmp_path / "Python.h").write_text("")
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = diagnosed("Triton")
    assert (found.status, found.found) == ("ok", f"compiles with {tmp_path}/gcc and {tmp_path}/Python.h")
    monkeypatch.setenv("CC", "no-such-compiler")
    (tmp_path / "Python.h").unlink()
    found = diagnosed("Triton")
    assert found.status == "warn" and "python3-dev" in found.remedy
    assert found.found == f"no C compiler (no-such-compiler) on PATH; no {tmp_path}/Python.h"


def test_no_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = diagnosed("C++ compiler")
    assert found.status == "warn" and found.found == "no no-such-compiler on PATH"


def test_the_hub_is_looked_for_through_the_proxy(monkeypatch: pytest.MonkeyPatch, closed_port: str) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in doctor.PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", f"http://{closed_port}")
    found = doctor.hub()
    assert found.status == "warn" and "through the proxy 127.0.0.1 cannot be reached" in found.found
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert doctor.hub().status == "ok"


def test_a_hub_that_may_not_be_asked_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in doctor.hub().found


def test_logins_are_found_and_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "HF_TOKEN_PATH", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert [each.found[:13] for each in doctor.logins()] == ["not logged in", "not logged in"]
    (tmp_path / "token").write_text("hf_secret")
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    found = doctor.logins()
    assert [each.found for each in found] == ["logged in", "logged in"] and "secret" not in str(found)
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert doctor.logins()[0].found.startswith("not logged in")
    (tmp_path / "cache" / "huggingface").mkdir(parents=True)
    (tmp_path / "token").rename(tmp_path / "cache" / "huggingface" / "token")
    assert doctor.logins()[0].found == "logged in"


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise PermissionError("/proc is not readable")

    monkeypatch.setattr(doctor.sandbox, "missing", broken)
    found = diagnosed("sandbox")
    assert found.status == "warn" and "could not be checked: PermissionError: /proc is not readable" in found.found
