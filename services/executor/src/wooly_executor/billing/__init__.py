"""What sessions use of the device, what it costs, and who reports it."""
