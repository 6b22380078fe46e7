"""Engines that generate responses, and the pool of processes that scores the responses."""
