"""Held revokes: the steps and deadline of a hold, and the hand-over to the next owner."""
