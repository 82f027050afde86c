"""Front door of Wooly: nodes, sessions, REST."""
