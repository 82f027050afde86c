"""TTIR to OpenCL C: `text` reads, `lower` writes, `ops` is the table of what is lowered."""
