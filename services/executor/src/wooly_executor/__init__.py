"""One device: sessions, buffers, runtimes, device loop."""
