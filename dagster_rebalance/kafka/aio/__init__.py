"""`AsyncRebalanceAwareConsumer`, the asyncio form of the consumer."""
