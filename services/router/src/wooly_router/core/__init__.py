"""What the router decides: pure functions and plain state. Time and ids come in as arguments."""
