"""What the controller remembers, in SQLAlchemy: SQLite embedded, PostgreSQL in production. Decides nothing."""
