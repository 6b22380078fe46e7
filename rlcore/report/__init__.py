"""Reports on runs as HTML, JSON and pictures, built from the files in a run's folder."""
