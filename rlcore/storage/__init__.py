"""Storage of files that are complete or absent: published directories, locks and disk space. It imports no torch."""
