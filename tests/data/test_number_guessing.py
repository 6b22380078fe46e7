"""The environment in which a number is guessed."""

import random

from data.number_guessing import Game


def test_replies_compare_the_guess_with_the_number() -> None:
    game = Game()
    for seed in range(5):
        game.reset({"seed": seed})
        number = random.Random(seed).randint(1, 7)
        for guess in range(-1, 10):
            turn = game.step(f" {guess} " if guess >= 0 else "what")
            if guess == number:
                assert (turn.reply, turn.done, turn.reward, turn.parts) == ("", True, 1.0, {"correct": 1.0})
            else:
                reply = ":" if guess < 0 else "+" if guess < number else "-"
                assert (turn.reply, turn.done, turn.reward, turn.parts) == (reply, False, -0.1, {"correct": 0.0})
    for text in ("\u00b2", "1" * 5_000):
        assert game.step(text).reply == ":"
