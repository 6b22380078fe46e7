"""`millrace doctor`: real checks of the machine, with remedies."""

import json
import re
import sys
from importlib import metadata
from importlib.util import find_spec

import pytest
from packaging.requirements import Requirement

from flows.work import machine as doctor
from rlcore.runtime.interpreter import Devices, Gpu
from tests.flows.conftest import REPOSITORY, in_this_process


def looked_at(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    done = in_this_process(capsys, "doctor", "--json")
    assert done.code == 1
    return {line["name"]: line for line in json.loads(done.out)}


@pytest.mark.slow
def test_doctor_reports_absent_server(monkeypatch, capsys):
    """vLLM is hidden: its import takes as long as everything else."""
    import torch

    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setitem(sys.modules, "vllm", None)
    lines = looked_at(capsys)
    assert "Unset it" in lines["Prefect server"]["remedy"]
    assert {"Python", "torch", "memory", "vLLM", "Prefect", "ports"} <= lines.keys()
    assert [name for name, line in lines.items() if line["level"] == "error"] == ["Prefect server"]
    assert all(line["remedy"] or line["level"] == "ok" for line in lines.values())
    assert lines["vLLM"]["found"].startswith("none: only rollout=hf")
    assert lines["torch"]["found"].startswith(f"{torch.__version__}, ")
    gpus = [name for name in lines if re.fullmatch(r"GPU \d+", name)]
    assert (len(gpus), "GPU" in lines) == (torch.cuda.device_count(), not gpus)


@pytest.mark.lengthy
@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here")
def test_vllm_is_imported(monkeypatch, capsys):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert looked_at(capsys)["vLLM"]["level"] == "ok"


def test_package_is_checked_against_range_and_tested_version():
    here = metadata.version("numpy")

    def check(wanted: str, tested: dict[str, str]) -> doctor.CheckResult:
        return doctor.check_package(Requirement(wanted), {"numpy": here}, tested, "Install it")

    assert check("numpy>=2", {"numpy": here}).level == "ok"
    assert check("numpy>=2", {"numpy": "2.0.0"}).found == f"{here}; tested: 2.0.0"
    assert check("numpy<2", {}).level == "error"
    missing = check("no-such-package>=1", {})
    assert (missing.found, missing.remedy) == ("is not installed; needed: >=1", "Install it")
    assert doctor.tested_versions(REPOSITORY / "constraints.txt")["hydra-core"] == "1.3.8"


def test_unsupported_and_busy_gpus_are_reported():
    gpus = (Gpu("new", (12, 0), 80, 80), Gpu("busy", (9, 0), 10, 80), Gpu("good", (8, 6), 80, 80))
    lines = list(doctor.check_gpus(Devices("2", "13.0", ("sm_80", "sm_90"), gpus)))
    assert [line.level for line in lines] == ["error", "warning", "ok"]
    assert "torch has code for sm_80, sm_90" in lines[0].found


def test_proxy_for_loopback_is_reported(monkeypatch):
    for name in ("ALL_PROXY", "all_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    (line,) = doctor.check_ports()
    assert (line.level, "no_proxy=127.0.0.1,localhost" in line.remedy) == ("warning", True)
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    assert [line.level for line in doctor.check_ports()] == ["ok"]
