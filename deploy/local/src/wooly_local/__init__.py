"""The local stack: nats-server and Wooly's services as supervised processes."""
