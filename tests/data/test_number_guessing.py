"""Guessing a number, an environment in one file."""

import random

from data.number_guessing import Game


def test_a_game_tells_whether_the_number_is_higher_or_lower() -> None:
    game = Game()
    for seed in range(5):
        game.reset({"seed": seed})
        number = random.Random(seed).randint(1, 7)
        for guess in range(-1, 10):
            told = game.step(f" {guess} " if guess >= 0 else "what")
            if guess == number:
                assert (told.reply, told.done, told.reward, told.parts) == ("", True, 1.0, {"correct": 1.0})
            else:
                reply = ":" if guess < 0 else "+" if guess < number else "-"
                assert (told.reply, told.done, told.reward, told.parts) == (reply, False, -0.1, {"correct": 0.0})
    for text in ("\u00b2", "1" * 5_000):
        assert game.step(text).reply == ":", "no number of this game, and none that int() takes"
