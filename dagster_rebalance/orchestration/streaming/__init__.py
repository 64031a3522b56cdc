"""Streaming runs: the sensor, the run, its worker and the calls of the assets."""
