"""Wooly on Kubernetes: applies policies to the controller, and turns annotations of pods into variables and placement."""
