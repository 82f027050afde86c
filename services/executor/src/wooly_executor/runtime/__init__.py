"""Runtimes: how programs run on one kind of device."""
