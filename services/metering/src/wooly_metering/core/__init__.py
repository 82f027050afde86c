"""Metering's arithmetic and checks. The code is pure and uses integers: no clock, no database, no NATS."""
