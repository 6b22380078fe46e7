"""Reports that a run writes of itself: HTML, JSON and pictures, from the files in its folder."""
