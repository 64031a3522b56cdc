"""Per-batch runs: the sensor and its member."""
