"""Held revokes: what a hold waits for, its deadline, and the hand-over to the next owner."""
