"""Reinforcement learning of language models: settings, algorithms, models, rollout, training and storage."""

from pathlib import Path

SOURCE_FOLDER = Path(__file__).resolve().parents[1]
"""The folder that contains `rlcore`, which is a git checkout or the parent of an installed package."""
