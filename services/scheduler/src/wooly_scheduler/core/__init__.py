"""What the scheduler decides and knows: pure, no asyncio, clock or NATS."""
