"""Storage of files that are whole or absent: published directories, locks and disk space. It imports no torch."""
