"""Who has which bytes of a device, and who must give some up. Integers in, decisions out.

Pure: no torch, no clock, no chance, no I/O.
"""
