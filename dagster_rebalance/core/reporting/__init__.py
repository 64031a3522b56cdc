"""Reports for operators: explain, lag, gaps, members, metrics and group status."""
