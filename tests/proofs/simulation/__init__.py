"""The simulator, and regressions that it has found."""
