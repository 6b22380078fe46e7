"""The plans and checks that run before any expensive work."""
