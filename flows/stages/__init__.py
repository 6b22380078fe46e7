"""Stages of a run, one file each; `flows.chain` lists them in order."""
