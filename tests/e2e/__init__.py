"""Tests of the whole stack. A package, so that a fixture can live as long as its modules are run."""
