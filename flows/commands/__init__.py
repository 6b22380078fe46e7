"""The commands of `millrace`."""
