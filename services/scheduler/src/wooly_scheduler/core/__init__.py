"""The scheduler's decisions and state. The code is pure: no asyncio, no clock, no NATS."""
