"""The decisions of the operator: pure functions over plain data, without clock, Kubernetes client or I/O."""
