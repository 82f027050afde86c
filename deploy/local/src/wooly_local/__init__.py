"""The embedded stack: nats-server and services as supervised processes."""
