"""Directives and macros. It reads no file: headers of CUDA and C are known by name, and their contents are built in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.lexer import MAX_TOKENS, Token, lines_of

_HEADERS: Final = (
    "assert.h cassert cfloat climits cmath cstddef cstdint cuda.h cuda_bf16.h cuda_fp16.h cuda_runtime.h cuda_runtime_api.h "
    "device_functions.h "
    "device_launch_parameters.h float.h limits.h math.h math_constants.h stddef.h stdint.h vector_functions.h "
    "vector_types.h"
)
#: Headers whose contents are built in.
HEADERS: Final = frozenset(_HEADERS.split())
_PREDEFINED: Final = {"__CUDACC__": "1", "__CUDACC_RTC__": "1", "__CUDA_ARCH__": "800", "__cplusplus": "201703L"}
#: Maximum number of macros.
MAX_MACROS: Final = 4096
#: Maximum depth of nested conditionals and macros.
MAX_DEPTH: Final = 64


@dataclass(frozen=True, slots=True)
class _Macro:
    params: tuple[str, ...] | None
    body: tuple[Token, ...]


def preprocess(text: str) -> list[Token]:
    """Return the tokens for the parser; the last has the kind ``end``.

    Raises:
        CudaSourceError: a directive is not supported, a header is unknown, or macros expand to too many tokens.
    """
    return _Preprocessor().run(text)


class _Preprocessor:
    def __init__(self) -> None:
        self._macros = {k: _Macro(None, (Token("number", v, 0),)) for k, v in _PREDEFINED.items()}
        self._made = 0

    def run(self, text: str) -> list[Token]:
        out: list[Token] = []
        pending: list[Token] = []
        #: Per open #if: whether a branch was taken, whether the current branch is taken, and the line of the #if.
        open_: list[tuple[bool, bool, int]] = []
        last = 1
        for line in lines_of(text):
            if not line:
                continue
            last = line[-1].line
            if line[0].text != "#":
                if all(live for _, live, _ in open_):
                    pending += line
                continue
            out += self._expanded(pending, frozenset())
            pending = []
            if len(line) > 1:
                self._directive(line[1], line[2:], open_)
        if open_:
            raise CudaSourceError("this #if has no #endif", open_[-1][2])
        out += self._expanded(pending, frozenset())
        out.append(Token("end", "the end of the source", last))
        return out

    def _directive(self, head: Token, rest: list[Token], open_: list[tuple[bool, bool, int]]) -> None:
        name, line = head.text, head.line
        live = all(on for _, on, _ in open_)
        if name in ("if", "ifdef", "ifndef"):
            taken = live and self._condition(name, rest, line)
            open_.append((taken, taken, line))
            if len(open_) > MAX_DEPTH:
                raise CudaSourceError(f"conditionals are nested deeper than {MAX_DEPTH}", line)
        elif name in ("elif", "else"):
            if not open_:
                raise CudaSourceError(f"this #{name} has no #if", line)
            before, _, began = open_.pop()
            outer = all(on for _, on, _ in open_)
            taken = outer and not before and (name == "else" or self._condition("if", rest, line))
            open_.append((before or taken, taken, began))
        elif name == "endif":
            if not open_:
                raise CudaSourceError("this #endif has no #if", line)
            open_.pop()
        elif not live:
            return
        elif name == "define":
            self._define(rest, line)
        elif name == "undef":
            if rest:
                self._macros.pop(rest[0].text, None)
        elif name == "include":
            self._include(rest, line)
        elif name == "error":
            raise CudaSourceError("#error " + " ".join(t.text for t in rest), line)
        elif name == "pragma":
            if rest and rest[0].text not in ("unroll", "nounroll", "once", "nv_diag_suppress", "GCC", "clang"):
                raise CudaSourceError(f"#pragma {rest[0].text} is not supported", line)
        else:
            raise CudaSourceError(f"the directive #{name} is not supported", line)

    def _include(self, rest: list[Token], line: int) -> None:
        name = "".join(t.text for t in rest).strip('"<>')
        if name not in HEADERS:
            raise CudaSourceError(
                f"cannot include {name!r}: no file is read; these headers are built in: {', '.join(sorted(HEADERS))}",
                line,
            )

    def _define(self, rest: list[Token], line: int) -> None:
        if not rest or rest[0].kind != "name":
            raise CudaSourceError("#define needs a name", line)
        if len(self._macros) >= MAX_MACROS:
            raise CudaSourceError(f"the source has more than {MAX_MACROS} macros", line)
        name, body = rest[0].text, rest[1:]
        params: tuple[str, ...] | None = None
        if body and body[0].text == "(" and body[0].glued:
            end = next((k for k, t in enumerate(body) if t.text == ")"), None)
            inner = body[1:end] if end is not None else []
            if end is None or any(t.kind != "name" for t in inner[::2]) or any(t.text != "," for t in inner[1::2]):
                raise CudaSourceError(f"the parameters of the macro {name} must be names", line)
            params, body = tuple([t.text for t in inner[::2]]), body[end + 1 :]
        for t in body:
            if t.text in ("#", "##"):
                raise CudaSourceError(f"{t.text} in a macro is not supported", line)
        self._macros[name] = _Macro(params, tuple(body))

    def _expanded(self, tokens: list[Token], hidden: frozenset[str], depth: int = 0) -> list[Token]:
        out: list[Token] = []
        at = 0
        while at < len(tokens):
            token = tokens[at]
            at += 1
            macro = self._macros.get(token.text) if token.kind == "name" and token.text not in hidden else None
            if macro is None:
                out.append(token)
                continue
            if depth >= MAX_DEPTH:
                raise CudaSourceError(f"macros are nested deeper than {MAX_DEPTH}", token.line)
            body = list(macro.body)
            if macro.params is not None:
                if at >= len(tokens) or tokens[at].text != "(":
                    out.append(token)
                    continue
                given, at = self._arguments(tokens, at, token)
                if len(given) != len(macro.params) and not (not macro.params and given == [[]]):
                    raise CudaSourceError(
                        f"the macro {token.text} takes {len(macro.params)} arguments, not {len(given)}",
                        token.line,
                    )
                values = {p: self._expanded(g, hidden, depth + 1) for p, g in zip(macro.params, given, strict=False)}
                body = [x for t in body for x in (values.get(t.text, [t]) if t.kind == "name" else [t])]
            self._made += len(body)
            if self._made > MAX_TOKENS:
                raise CudaSourceError(f"macros expand to more than {MAX_TOKENS} tokens", token.line)
            placed = [Token(t.kind, t.text, token.line) for t in body]
            out += self._expanded(placed, hidden | {token.text}, depth + 1)
        return out

    def _arguments(self, tokens: list[Token], at: int, name: Token) -> tuple[list[list[Token]], int]:
        given: list[list[Token]] = [[]]
        depth = 0
        while at < len(tokens):
            token = tokens[at]
            at += 1
            if token.text in ("(", "[", "{"):
                depth += 1
                if depth == 1:
                    continue
            elif token.text in (")", "]", "}"):
                depth -= 1
                if depth == 0:
                    return given, at
            if token.text == "," and depth == 1:
                given.append([])
            else:
                given[-1].append(token)
        raise CudaSourceError(f"the arguments of the macro {name.text} have no closing parenthesis", name.line)

    def _condition(self, kind: str, rest: list[Token], line: int) -> bool:
        if kind != "if":
            if not rest:
                raise CudaSourceError(f"#{kind} needs a name", line)
            return (rest[0].text in self._macros) == (kind == "ifdef")
        plain: list[Token] = []
        at = 0
        while at < len(rest):
            if rest[at].text == "defined":
                named = [t for t in rest[at + 1 : at + 4] if t.kind == "name"][:1]
                if not named:
                    raise CudaSourceError("defined needs a name", line)
                at += 4 if rest[at + 1].text == "(" else 2
                plain.append(Token("number", str(int(named[0].text in self._macros)), line))
            else:
                plain.append(rest[at])
                at += 1
        words = [Token("number", "0", line) if t.kind == "name" else t for t in self._expanded(plain, frozenset())]
        from wooly_cuda_c.syntax.parser import constant_of_tokens

        return constant_of_tokens(words, line) != 0
