"""The syntax tree of a source, with types by name. `printing` decides what it means."""

from __future__ import annotations

from dataclasses import dataclass, field

# -- types as they are written ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Named:
    """A named type, or ``auto``."""

    name: str
    const: bool = False


@dataclass(frozen=True, slots=True)
class PointerTo:
    """A pointer."""

    to: Written


@dataclass(frozen=True, slots=True)
class ReferenceTo:
    """A reference."""

    to: Written


@dataclass(frozen=True, slots=True)
class ArrayOf:
    """An array; `count` is None if the brackets are empty."""

    of: Written
    count: Node | None


Written = Named | PointerTo | ReferenceTo | ArrayOf

# -- expressions and statements --------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Node:
    """Base of all nodes: it has a line."""

    line: int


@dataclass(slots=True, eq=False)
class Number(Node):
    """A literal; `kind` is the name of its scalar type."""

    text: str
    value: float | int
    kind: str


@dataclass(slots=True, eq=False)
class Name(Node):
    """A name, with or without template arguments."""

    name: str
    template: list[Written | Node] | None = None


@dataclass(slots=True, eq=False)
class Unary(Node):
    """``- + ! ~ * & ++ --`` before an expression; ``p++ p--`` after one."""

    op: str
    on: Node


@dataclass(slots=True, eq=False)
class Binary(Node):
    """A binary operator, including ``,``."""

    op: str
    left: Node
    right: Node


@dataclass(slots=True, eq=False)
class Assign(Node):
    """``=`` or a compound assignment; `op` is without the ``=``."""

    op: str
    to: Node
    value: Node


@dataclass(slots=True, eq=False)
class Conditional(Node):
    """``c ? a : b``."""

    condition: Node
    then: Node
    other: Node


@dataclass(slots=True, eq=False)
class Call(Node):
    """A call of a function by name."""

    name: Name
    args: list[Node]


@dataclass(slots=True, eq=False)
class Index(Node):
    """``a[i]``."""

    on: Node
    index: Node


@dataclass(slots=True, eq=False)
class Member(Node):
    """``a.x``, or ``a->x``."""

    on: Node
    name: str
    arrow: bool


@dataclass(slots=True, eq=False)
class Cast(Node):
    """A conversion; `how` is ``c``, ``call``, or the name of a C++ cast."""

    to: Written
    on: Node | None
    how: str


@dataclass(slots=True, eq=False)
class SizeOf(Node):
    """``sizeof`` a type or an expression."""

    of: Written | Node


@dataclass(slots=True, eq=False)
class Braces(Node):
    """``{a, b}`` as an initializer."""

    items: list[Node]


@dataclass(slots=True, eq=False)
class Declare(Node):
    """A declaration of one variable."""

    type: Written
    name: str
    init: Node | None
    shared: bool = False
    extern: bool = False
    constant: bool = False
    constexpr: bool = False


@dataclass(slots=True, eq=False)
class Block(Node):
    """Statements in order; `scope` is False for declarations written as one (``int a, b;``)."""

    body: list[Node]
    scope: bool = True


@dataclass(slots=True, eq=False)
class Express(Node):
    """An expression as a statement."""

    value: Node | None


@dataclass(slots=True, eq=False)
class If(Node):
    """``if``."""

    condition: Node
    then: Node
    other: Node | None
    constexpr: bool = False


@dataclass(slots=True, eq=False)
class Loop(Node):
    """``for``, ``while`` (no init, no step), or ``do`` (`first`: the body runs before the condition)."""

    init: Node | None
    condition: Node | None
    step: Node | None
    body: Node
    first: bool = False


@dataclass(slots=True, eq=False)
class Return(Node):
    """``return``."""

    value: Node | None


@dataclass(slots=True, eq=False)
class Leave(Node):
    """``break`` or ``continue``."""

    how: str


@dataclass(slots=True, eq=False)
class Switch(Node):
    """``switch``; each case has labels (None: default) and statements."""

    on: Node
    cases: list[tuple[list[Node | None], list[Node]]]


@dataclass(slots=True, eq=False)
class Alias(Node):
    """Another name of a type."""

    name: str
    type: Written


# -- the top ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TemplateParam:
    """A template parameter: a type (`kind` is None), or a constant of type `kind`."""

    name: str
    kind: Written | None
    default: Written | Node | None


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a function."""

    type: Written
    name: str
    line: int

    @property
    def pointer(self) -> bool:
        """Whether it is a pointer."""
        return isinstance(self.type, PointerTo)

    @property
    def const(self) -> bool:
        """Whether it is a pointer to const."""
        return isinstance(self.type, PointerTo) and isinstance(self.type.to, Named) and self.type.to.const


@dataclass(slots=True, eq=False)
class Function(Node):
    """A kernel or a device function."""

    name: str
    kernel: bool
    result: Written
    params: list[Param]
    template: list[TemplateParam]
    body: Block | None


@dataclass(slots=True, eq=False)
class Struct(Node):
    """Plain data: only fields."""

    name: str
    fields: list[tuple[str, Written]]


@dataclass(slots=True)
class Unit:
    """A source.

    Attributes:
        functions: functions by name, in order.
        variables: constants of the source.
        aliases: other names of types.
        structs: structs by name.
    """

    functions: dict[str, list[Function]] = field(default_factory=dict)
    variables: list[Declare] = field(default_factory=list)
    aliases: dict[str, Alias] = field(default_factory=dict)
    structs: dict[str, Struct] = field(default_factory=dict)

    def kernels(self) -> list[str]:
        """Return the names of the kernels."""
        return [n for n, f in self.functions.items() if any(x.kernel for x in f)]
