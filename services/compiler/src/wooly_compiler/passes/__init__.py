"""The passes, one module each: a name, a description, a function."""
