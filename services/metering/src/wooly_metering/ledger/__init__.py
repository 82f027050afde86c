"""The ledger in a database: SQLite for a stack on one machine, PostgreSQL in production."""
