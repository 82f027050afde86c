"""Jobs: modules that this executor replays without a client."""
