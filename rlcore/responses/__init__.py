"""The stored responses of a run, with functions that store, search and audit them."""
