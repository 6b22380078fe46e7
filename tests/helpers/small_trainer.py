"""A real process that only speaks the trainer's protocol. Its first argument names the failure."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

STEP_S = 0.01


class SmallTrainer:
    """`behavior` is one of the names in `tests/flows/work/test_trainer.py`. Steps are stored in a file."""

    def __init__(self, behavior: str, run_dir: Path, replies_fd: int) -> None:
        self.behavior = behavior
        self.run_dir = run_dir
        self.replies = os.fdopen(replies_fd, "w", buffering=1)
        self.stop = False
        self.is_idle = True

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        print(f"signal {number}")
        self.stop = self.behavior != "deaf"
        if self.is_idle:
            self.leave_if_stopped()

    def leave_if_stopped(self) -> None:
        if self.stop:
            message = f"saved step {self.committed()}"
            self.send(event="error", command="stop", type="StopRequestedError", message=message)
            sys.exit(75)

    def send(self, **event: Any) -> None:
        self.replies.write(json.dumps(event) + "\n")

    def committed(self) -> int:
        file = self.run_dir / "step"
        return int(file.read_text()) if file.exists() else 0

    def train(self, to_step: int) -> None:
        for step in range(self.committed() + 1, to_step + 1):
            time.sleep(STEP_S if self.behavior != "slow" else 0.2)
            self.send(event="progress", stage="train", step=step, total_steps=to_step, metrics={}, eta_s=float("nan"))
            if step == 3 and not (self.run_dir / "tripped").exists():
                (self.run_dir / "tripped").touch()
                self.trip()
            (self.run_dir / "step").write_text(str(step))
            if self.stop:
                self.send(event="error", command="train", type="StopRequestedError", message=f"saved step {step}")
                sys.exit(75)
        self.send(event="done", command="train", result={"step": to_step})

    def trip(self) -> None:
        match self.behavior:
            case "killed":
                print("about to be killed", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            case "orphans":  # a helper keeps the pipe and lives on
                helper = subprocess.Popen(["sleep", "600"], close_fds=False)
                (self.run_dir / "helper").write_text(str(helper.pid))
                os.kill(os.getpid(), signal.SIGKILL)
            case "nonfinite":
                self.send(event="error", command="train", type="NonFiniteError", message="loss is nan")
                sys.exit(1)
            case "bug":
                self.send(event="error", command="train", type="KeyError", message="KeyError: 'x'")
                sys.exit(1)
            case "babble":
                self.replies.write("hello\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("behavior")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--commands-fd", type=int)
    parser.add_argument("--replies-fd", type=int)
    arguments = parser.parse_args()
    trainer = SmallTrainer(arguments.behavior, arguments.run, arguments.replies_fd)
    signal.signal(signal.SIGTERM, trainer.on_signal)
    print("ready", flush=True)
    for line in os.fdopen(arguments.commands_fd):
        command = json.loads(line)
        if command["command"] == "close":
            print("closed")
            return
        if command["command"] == "who":
            trainer.send(event="done", command="who", result={"pid": os.getpid(), "session": os.getsid(0)})
            continue
        trainer.is_idle = False
        trainer.train(command["to_step"])
        trainer.is_idle = True
        trainer.leave_if_stopped()  # the signal may have come in the command's last moment


if __name__ == "__main__":
    main()
