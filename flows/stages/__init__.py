"""The stages of a run. `flows.chain` lists them in order."""
