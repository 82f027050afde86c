"""What the operator decides: pure functions over plain data. Knows no clock, no Kubernetes client, no I/O."""
