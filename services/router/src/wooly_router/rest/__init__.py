"""REST under /api/v1: for people, scripts and probes. Decides nothing: it asks the actors and the stores."""
