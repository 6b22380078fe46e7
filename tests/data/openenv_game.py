"""A server of the package openenv, for tests: `python openenv_game.py PORT SESSIONS`. Guess a number by `+` and `-`.

This file is a script, because the package has its own Python environment.
"""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    guess: str


class Hint(Observation):
    hint: str


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **rest: Any) -> Hint:
        self.number = random.Random(seed).randint(1, 7)
        return Hint(hint=":")

    def step(self, action: Guess, timeout_s: float | None = None, **rest: Any) -> Hint:
        guess = action.guess.strip()
        if guess == str(self.number):
            return Hint(hint="", done=True, reward=1)
        is_number = guess.isdecimal() and guess.isascii() and len(guess) < 9
        return Hint(hint=":" if not is_number else "+" if int(guess) < self.number else "-", reward=-0.1)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    port, sessions = map(int, sys.argv[1:])
    app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
