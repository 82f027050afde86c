"""Sources to code that a chip runs. The only place that knows vendors' compilers."""
