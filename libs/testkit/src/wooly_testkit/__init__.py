"""Private test fixtures of Wooly."""
