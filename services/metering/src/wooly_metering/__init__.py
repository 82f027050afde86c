"""The metering service (Wooly Credits): turns usage of sessions into entries of a ledger, sums, budgets and statements."""
