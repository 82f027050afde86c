"""Contents that several sessions share, and weights that stay without a session."""
