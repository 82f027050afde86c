"""Passes over a unit, one module each: a name, a sentence, a function."""
