"""Wooly's control plane over NATS, and its data channel."""
