"""Prints kernel IR as C. There is one printer; dialects and forms are data."""
