"""The commands of `millrace`, one file each."""
