"""The decision core of a member: events in, commands out."""
