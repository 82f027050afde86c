"""Metering's arithmetic and judgement: integers in, integers out. No clock, no database, no NATS."""
