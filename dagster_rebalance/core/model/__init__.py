"""Types of the core: offsets, topics, runs, claims, directives, events, commands."""
