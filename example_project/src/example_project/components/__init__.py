"""The project's own component types; none yet."""
