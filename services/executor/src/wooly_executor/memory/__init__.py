"""Decides which session has which bytes of a device, and which session must give up bytes.

Pure: no torch, no clock, no randomness, no I/O.
"""
