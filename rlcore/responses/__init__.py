"""The stored responses of a run: storage, search, audit and rescoring."""
