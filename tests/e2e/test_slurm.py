"""The batch script of `millrace new slurm`: a run that is preempted, and resumes with the same numbers."""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from flows.commands.new import new
from rlcore.runtime.cluster import loopback_environment
from rlcore.workers.device import free_address
from tests.flows.conftest import WAIT_S, numbers, wait_until
from tests.helpers import share_of_digits
from tests.helpers.programs import SYSTEM_PATH

pytestmark = [pytest.mark.needs_ray, pytest.mark.slow, pytest.mark.timeout(3 * WAIT_S)]

STEPS, CHUNK = 36, 3
SETTINGS = (
    "experiment=debug", "data.scorer=share_of_digits:score", "warm_start.enabled=false", "tracking.enabled=false",
    "validation.every_steps=18", "runtime.stop_deadline_s=200", f"trainer.total_steps={STEPS}",
    f"trainer.steps_per_chunk={CHUNK}",
)  # fmt: skip
SCRIPTS = """#!/bin/bash
# srun: start the command as two tasks
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=0 "$@" & SLURM_PROCID=1 "$@" & wait
"""
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=15
MpiDefault=none
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=1
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs=1
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 State=UP
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF State=UP
"""  # A requeued job waits for `cred_expire` seconds. A job of `high` preempts a job of `low`


@contextmanager
def slurm(folder: Path) -> Iterator[Callable[..., str]]:
    """Run the daemons inside the block. Yield a function that executes a SLURM command and returns its output."""
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    ports = [free_address().rpartition(":")[2] for _ in range(3)]
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(host=socket.gethostname(), folder=folder, user=user, ports=ports))
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    (folder / "key").write_bytes(secrets.token_bytes(64))
    (folder / "key").chmod(0o600)
    environment = {**os.environ, "SLURM_CONF": str(configuration)}

    def command(*words: str) -> str:
        return subprocess.check_output(words, env=environment, text=True)

    files = {"socket": "munge.sock", "key-file": "key", "pid-file": "munge.pid", "log-file": "munge.log"}
    options = [f"--{option}={folder / file}" for option, file in {**files, "seed-file": "seed"}.items()]
    try:
        for start in (["munged", "--force", *options], ["slurmctld", "-i"], ["slurmd", "-Nn1"], ["slurmd", "-Nn2"]):
            subprocess.run(start, env=environment | {"PATH": SYSTEM_PATH}, check=True, capture_output=True, timeout=60)
        sinfo = ("sinfo", "--noheader", "--format=%D", "--states=idle", "--partition=low")
        wait_until(lambda: command(*sinfo).split() == ["2"], "two idle nodes")
        yield command
    finally:
        subprocess.run(["scancel", "--me", "--signal=KILL", "--full"], env=environment, check=False)
        for file in folder.glob("*.pid"):
            os.kill(int(file.read_text()), signal.SIGTERM)


@dataclass(frozen=True)
class Job:
    folder: Path

    @property
    def run_dir(self) -> Path:
        (found,) = self.folder.glob("artifacts/runs/*")
        return found

    def last_step(self) -> int:
        return max((int(one.name[5:]) for one in self.folder.glob("artifacts/runs/*/checkpoints/step-*")), default=0)

    def advance(self) -> None:
        step = self.last_step() + 2 * CHUNK
        assert step < STEPS
        wait_until(lambda: self.last_step() >= step, f"checkpoint {step}")

    def weights(self) -> str:
        return sha256((self.run_dir / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in loopback_environment():
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job(tmp_path_factory.mktemp("undisturbed"))
    shutil.copy(share_of_digits.__file__, job.folder)
    words = [Path(sys.executable).with_name("millrace"), "train", *SETTINGS, "runtime=ray", "runtime.num_workers=2"]
    subprocess.run(words, cwd=job.folder, check=True, timeout=WAIT_S)
    return job


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.chdir(tmp_path)
    shutil.copy(share_of_digits.__file__, tmp_path)
    new("slurm", "job")
    script = Path("job.sbatch")
    text = script.read_text().replace("experiment=debug", " ".join(SETTINGS)).replace("per-task=2", "per-task=1")
    script.write_text(text)
    return Job(tmp_path)


def assert_equal(job: Job, undisturbed: Job) -> None:
    assert len(numbers(undisturbed.run_dir)) == STEPS + 1
    assert numbers(job.run_dir) == numbers(undisturbed.run_dir)
    assert job.weights() == undisturbed.weights()


def test_script_without_slurm_saves_and_resumes(job: Job, undisturbed: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    (job.folder / "bin").mkdir()
    for name, text in {"srun": SCRIPTS, "scontrol": '#!/bin/bash\necho "$@" >> requeued\n'}.items():
        (job.folder / "bin" / name).write_text(text)
        (job.folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{job.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    for name, value in {"JOB_ID": os.getpid(), "JOB_NUM_NODES": 2, "CPUS_PER_TASK": 1}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    codes = []
    for is_preempted in (True, False):
        with subprocess.Popen(["bash", "job.sbatch"], start_new_session=True) as script:
            try:
                if is_preempted:
                    job.advance()
                    script.send_signal(signal.SIGUSR1)
                codes.append(script.wait(WAIT_S))
            finally:
                os.killpg(script.pid, signal.SIGKILL)  # as SLURM ends the processes of a job
    assert codes == [75, 0]
    assert Path("requeued").read_text() == f"requeue {os.getpid()}\n"
    assert_equal(job, undisturbed)


@pytest.mark.lengthy
@pytest.mark.program("slurmd")
def test_job_that_slurm_preempts_twice_resumes(
    job: Job, undisturbed: Job, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with slurm(tmp_path_factory.mktemp("slurm")) as command:
        number = command("sbatch", "--parsable", "--output=job.log", "job.sbatch").strip()
        job.advance()
        command("scontrol", "requeue", number)
        job.advance()
        command("sbatch", "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=true")
        wait_until(lambda: "COMPLETED" in command("scontrol", "show", "job", number), "the end of the job")
        restarts = re.findall(r"Restarts=(\d+)", command("scontrol", "show", "job", number))
    log = Path("job.log").read_text()
    assert restarts == ["2"], log
    assert "which is saved; start again to resume" in log
    assert_equal(job, undisturbed)
