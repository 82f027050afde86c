"""Collectives: sessions that are ranks of a group compute together on one device."""
