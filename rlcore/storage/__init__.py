"""Locks, small files, checks of disk space, and directories that appear only when they are complete. This package
imports no torch."""
