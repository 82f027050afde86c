"""The ledger in a database: SQLite where everything is on one machine, PostgreSQL in production."""
