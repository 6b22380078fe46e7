"""Environments for the tests of episodes: one that counts, and some that fail for certain games."""

import asyncio
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.rollout.environment import Turn

SLEEP_S = "ODD_SLEEP_S"
"""Environment variable: sleep of the child process of `Odd`. Each test has its own duration, to find its process."""


class Counting:
    """Replies with the number of turns, and ends at the fourth. The reward depends on the text."""

    def reset(self, row: Mapping[str, Any]) -> str | None:
        self.turns, self.row = 0, row
        return None

    async def step(self, text: str) -> Turn:
        await asyncio.sleep(0)
        self.turns += 1
        return Turn(f"{self.turns} +", self.turns == 4, reward=len(text) + self.row["seed"] % 7, parts={"even": 1.0})


class Greeting(Counting):
    def reset(self, row: Mapping[str, Any]) -> str | None:
        super().reset(row)
        return "1 + 1"


class Slow(Counting):
    async def step(self, text: str) -> Turn:
        await asyncio.sleep(0.6)
        return await super().step(text)


class Noted(Counting):
    def reset(self, row: Mapping[str, Any]) -> str | None:
        with Path(os.environ["BEGUN"]).open("a") as file:
            file.write("!")
        return super().reset(row)


class Odd(Counting):
    """Fails in the second turn, by the number of the game."""

    HANGS, ENDS = 16, (41, 49)  # few games: each of the first costs its deadline, each of the others two processes

    @classmethod
    def is_lost(cls, game: int) -> bool:
        return game == cls.HANGS or game in cls.ENDS or game % 8 in (2, 4)

    async def step(self, text: str) -> Turn:
        turn, game = await super().step(text), self.row["game"]
        if self.turns != 2:
            return turn
        if game == self.HANGS:
            subprocess.Popen(["sleep", os.environ[SLEEP_S]])
            time.sleep(3_600)
        if game in self.ENDS:
            os._exit(3)
        if game % 8 == 2:
            raise RuntimeError("no")
        if game % 8 == 3:
            return Turn("7 " * 50_000_000)
        return Turn(4) if game % 8 == 4 else turn  # type: ignore[arg-type]


class Prompt(Odd):
    """Like `Odd`, but without the game that hangs, which costs a deadline."""

    HANGS = -1


def kill_once(pid: int) -> None:
    """Kill one process, whichever of the processes asks first."""
    try:
        Path(os.environ["KILLED_ONCE"]).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(pid, 9)


class KilledOnce(Counting):
    """Kills its process once, at the first third turn, as a user might."""

    async def step(self, text: str) -> Turn:
        turn = await super().step(text)
        if self.turns == 3:
            kill_once(os.getpid())
        return turn


class KillsTheRun(Counting):
    """Kills the trainer once, in an episode after the third step."""

    async def step(self, text: str) -> Turn:
        turn = await super().step(text)
        journal = Path(os.environ["JOURNAL"])
        if self.turns == 3 and journal.exists() and journal.read_bytes().count(b"\n") >= 4:
            kill_once(os.getppid())
        return turn


class KilledForGood(KilledOnce):
    """The same, without repetition."""

    repeatable = False
