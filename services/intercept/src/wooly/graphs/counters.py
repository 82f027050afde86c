"""Counts the calls of compiled functions in this process."""


class Counters:
    """Number of calls of compiled functions in this process, by how they ran.

    Attributes:
        recorded: calls that were recorded.
        replayed: calls that sent a recorded program.
        eager: calls that ran eagerly.
        operations: operators in the replayed programs.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = self.eager = self.operations = 0


counters = Counters()
