"""REST under /api/v1, for users, scripts and probes. It makes no decisions: it calls the actors and the stores."""
