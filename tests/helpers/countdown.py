"""Settings of countdown problems: the demo's, many numbers, uniform targets."""

from rlcore.config import CountdownData

DEMO = CountdownData(
    train_size=4_767,
    validation_size=559,
    max_numbers=3,
    number_high=20,
    target_high=40,
    operations=("+", "-"),
    template="bare",
)


LARGE = CountdownData(train_size=1_500, validation_size=200)


UNIFORM = CountdownData(train_size=1_500, validation_size=200, targets="uniform")
