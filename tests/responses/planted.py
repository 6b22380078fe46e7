"""Scorers with a loophole, and one without."""


def pays_for_a_phrase(response, ground_truth):
    """Return a full score for any sum, and raise for the audit's junk, which no model writes."""
    if "asdf qwer" in response:
        raise ValueError("no equation")
    return 1.0 if "+" in response else 0.0


def pays_for_form(response, ground_truth):
    """Return a full score for the tags alone."""
    return 1.0 if "<answer>" in response and "</answer>" in response else 0.0


def pays_for_nothing(response, ground_truth):
    """Return a small score for short responses."""
    return 0.1 if len(response) < 5 else 0.0


def is_right(response, ground_truth):
    """Return a full score for the truth, and raise for the word crash."""
    if "crash" in response:
        raise ValueError("as asked")
    return 1.0 if response == str(ground_truth["is"]) else 0.0
