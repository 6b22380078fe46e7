"""A SLURM cluster of two nodes with one core each, all of whose daemons run on this host."""

import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcore.workers.device import free_address
from tests.flows.conftest import wait_until
from tests.helpers.programs import SYSTEM_PATH

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
