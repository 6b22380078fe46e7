"""Reinforcement learning of language models: settings, algorithms, models, rollout, training and storage."""
