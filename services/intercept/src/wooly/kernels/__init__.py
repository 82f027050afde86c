"""PyTorch operators on the Wooly device: how each kind of dispatcher call becomes WIS or a change of metadata."""
