"""How much of this process was sent as whole programs."""


class Counters:
    """What graphs did in this process.

    Attributes:
        recorded: calls that were recorded.
        replayed: calls that were one program.
        eager: calls that stayed eager.
        operations: operators that the replayed programs stand for.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = self.eager = self.operations = 0


counters = Counters()
