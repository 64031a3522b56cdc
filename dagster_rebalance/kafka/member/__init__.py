"""The group member: its session with the coordinator, its commits, and how it leaves."""
