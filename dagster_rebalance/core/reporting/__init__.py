"""Reports for people: explain, lag, gaps, metrics and the status of a group."""
