"""Tests of the whole stack. They are a package, so that a fixture can live as long as its modules run."""
