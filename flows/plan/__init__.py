"""Plans and checks before anything expensive."""
