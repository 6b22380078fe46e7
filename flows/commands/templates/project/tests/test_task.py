"""A test of the scorer: a reference earns the full score, and another text earns less."""

from NAME import build, score

from rlcore.config import CustomData


def test_reference_earns_full_score() -> None:
    """Check for each row that the reference scores 1.0 and that a wrong response scores less."""
    rows = build(CustomData(build="NAME:build", train_size=4, validation_size=2), seed=1)
    for row in rows.splits["train"]:
        assert score(str(row.solution), row.ground_truth).total == 1.0
        assert score("no answer", row.ground_truth).total < 1.0
