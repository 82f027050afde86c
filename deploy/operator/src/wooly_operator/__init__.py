"""Wooly on Kubernetes: policies become the controller's settings, annotations become environment and placement."""
