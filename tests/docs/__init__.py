"""The documentation, run and compared with the code."""
