"""The router's decisions as pure functions and plain state. Time and ids are arguments."""
