"""The simulator, and what it has found."""
