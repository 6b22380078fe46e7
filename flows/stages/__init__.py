"""The stages of a run, each in a separate file. `flows.chain` lists them in order."""
