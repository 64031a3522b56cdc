"""`RebalanceAwareConsumer` and its rebalance listeners (KIP-983, KIP-1306)."""
