"""The controller's state in SQLAlchemy: SQLite by default, PostgreSQL in production. The stores make no decisions."""
