"""The plans and checks that precede any expensive work."""
