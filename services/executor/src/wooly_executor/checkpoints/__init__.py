"""Checkpoints of sessions, so that a session can go on in another executor: see docs/adr/0071."""
