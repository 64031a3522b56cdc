"""Contract of the group member."""
