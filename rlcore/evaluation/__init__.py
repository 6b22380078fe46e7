"""Evaluation of models: responses to held-out problems, their metrics and intervals."""
