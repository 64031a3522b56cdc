"""DataFrames over exact offset ranges, and their decoded columns."""
