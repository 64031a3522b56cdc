"""The project's definitions."""
