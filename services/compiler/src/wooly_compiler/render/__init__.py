"""Kernel IR to C: one printer, dialects and forms as data."""
