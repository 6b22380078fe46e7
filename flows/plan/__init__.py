"""What a run would do, and what is looked at before anything expensive."""
