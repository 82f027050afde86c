"""Runtimes: how programs run on each kind of device."""
