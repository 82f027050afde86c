"""Wooly Credits: what sessions used becomes entries of a ledger, sums, budgets and statements."""
