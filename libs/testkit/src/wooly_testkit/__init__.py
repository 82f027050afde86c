"""Wooly's private code for tests, benchmarks and studies."""
