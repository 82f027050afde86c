"""The executor: one process per device, with sessions, buffers, runtimes and the device loop."""
