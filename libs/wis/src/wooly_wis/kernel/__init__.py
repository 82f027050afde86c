"""Kernel IR: what one generated kernel computes, before anyone decides how its loops run on a chip."""
