"""NATS control plane and data channel of Wooly."""
