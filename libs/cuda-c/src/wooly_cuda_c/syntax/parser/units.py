"""Parses the top level of a source: functions, structs, templates, variables."""

from __future__ import annotations

from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.lexer import Token
from wooly_cuda_c.syntax.parser.statements import StatementParser
from wooly_cuda_c.syntax.tree import (
    ArrayOf,
    Block,
    Declare,
    Function,
    Named,
    Node,
    Param,
    PointerTo,
    Struct,
    TemplateParam,
    Unit,
    Written,
)
from wooly_cuda_c.syntax.words import IGNORED, REFUSED

_WORDS = ("__global__", "__device__", "__host__", "__launch_bounds__", "extern", "constexpr", "__constant__")
_WORDS_BEHIND = ("__global__", "__device__", "__host__", "__launch_bounds__", "__forceinline__", "__inline__", "inline")


class UnitParser(StatementParser):
    """Parses a complete source."""

    def unit(self) -> Unit:
        """Parse the complete source."""
        found = Unit()
        open_ = 0
        while self._now.kind != "end":
            self._refuse_word()
            if self._is("extern") and self._ahead().kind == "string":
                self._next()
                if self._next().text != '"C"':
                    raise CudaSourceError('only extern "C" is supported', self._now.line)
                open_ += self._take("{")
            elif open_ and self._take("}"):
                open_ -= 1
            elif self._take(";"):
                pass
            elif self._is("using", "typedef"):
                if self._is("typedef") and self._ahead().text == "struct":
                    self._next()
                    self._struct(found, typedef=True)
                    continue
                alias = self._alias()
                found.aliases[alias.name] = alias
            elif self._is("struct") and self._ahead(2).text == "{":
                self._struct(found)
            elif self._is("static_assert"):
                self._skip_call(self._now.line)
            else:
                self._top(found)
        if open_:
            raise CudaSourceError('an extern "C" block has no closing brace', self._now.line)
        return found

    def _struct(self, unit: Unit, typedef: bool = False) -> None:
        line = self.expect("struct").line
        while self._is("__align__", "alignas"):
            self._next()
            self.expect("(")
            self.expression()
            self.expect(")")
        name = self._name().text if self._now.kind == "name" else ""
        if name:
            self.types.add(name)
        self.expect("{")
        fields: list[tuple[str, Written]] = []
        while not self._take("}"):
            base = self._base()
            while True:
                kind = self._pointers(base)
                field = self._name()
                if self._is("("):
                    raise CudaSourceError("methods are not supported: use functions", field.line)
                fields.append((field.text, self._dimensions(kind)))
                if not self._take(","):
                    break
            if self._is("=", "{"):
                raise CudaSourceError("initial values of fields are not supported", self._now.line)
            self.expect(";")
        if typedef:
            name = self._name().text
            self.types.add(name)
        if not name:
            raise CudaSourceError("a struct needs a name", line)
        self.expect(";")
        unit.structs[name] = Struct(line, name, fields)

    def _template(self) -> list[TemplateParam]:
        found: list[TemplateParam] = []
        self._next()
        self.expect("<")
        while not self._is(">"):
            default: Written | Node | None = None
            if self._is("typename", "class"):
                self._next()
                if self._is("...") or self._ahead().text == "...":
                    raise CudaSourceError("variadic templates are not supported", self._now.line)
                name = self._name().text
                self.types.add(name)
                if self._take("="):
                    default = self.type()
                found.append(TemplateParam(name, None, default))
            else:
                kind = self.type()
                name = self._name().text
                if self._take("="):
                    self._angles += 1
                    default = self._binary(8)
                    self._angles -= 1
                found.append(TemplateParam(name, kind, default))
            if not self._take(","):
                break
        self.expect(">")
        return found

    def _top(self, unit: Unit) -> None:
        outer = set(self.types)
        line = self._now.line
        explicit = self._is("template") and self._ahead().text != "<"
        if explicit:  # an explicit instantiation is skipped, because the launch names the arguments
            self._next()
        template = [] if explicit else self._template_head(line)
        start = self._at
        words = self._words_before()
        result = self._pointers(self._base())
        words |= self._words_behind()
        if self._ahead().text not in ("(", "<"):
            self._at = start
            self._variable(unit, line, "__device__" in words)
            self.types = outer | set(unit.aliases)
            return
        name = self._name()
        if explicit:
            while self._now.kind != "end" and not self._take(";"):
                self._next()
            return
        kernel = "__global__" in words
        if not kernel and "__device__" not in words:
            if "__host__" in words:
                raise CudaSourceError(
                    f"{name.text} is a host function: a source has only kernels and device functions", name.line
                )
            raise CudaSourceError(f"{name.text} must be __global__ or __device__", name.line)
        self._functions.add(name.text)
        params = self._params()
        if self._take(";"):
            self.types = outer
            return
        if self._is("const", "noexcept"):
            self._next()
        function = Function(name.line, name.text, kernel, result, params, template, None)
        function.body = self._block()
        unit.functions.setdefault(name.text, []).append(function)
        self.types = outer

    def _template_head(self, line: int) -> list[TemplateParam]:
        """Parse the parameters of a template, if one begins here."""
        if not self._is("template"):
            return []
        found = self._template()
        if self._is("template"):
            raise CudaSourceError("templates of templates are not supported", line)
        if not found:
            raise CudaSourceError("template specializations are not supported: use if constexpr", line)
        return found

    def _words_before(self) -> set[str]:
        """Read the words before a type that say what is declared."""
        found: set[str] = set()
        while (text := self._now.text) in _WORDS or text in IGNORED:
            self._next()
            if text not in _WORDS:
                continue
            found.add(text)
            if text == "__launch_bounds__":
                self._launch_bounds()
            if text == "extern" and self._now.kind == "string":
                self._next()
        return found

    def _words_behind(self) -> set[str]:
        """Read the words between a type and a function's name. `__host__` is ignored there."""
        found: set[str] = set()
        while self._is(*_WORDS_BEHIND):
            text = self._next().text
            found.add(text)
            if text == "__launch_bounds__":
                self._launch_bounds()
        return found - {"__host__"}

    def _launch_bounds(self) -> None:
        self.expect("(")
        self.expression()
        self.expect(")")

    def _params(self) -> list[Param]:
        self.expect("(")
        found: list[Param] = []
        if self._is("void") and self._ahead().text == ")":
            self._next()
        while not self._is(")"):
            if self._is("..."):
                raise CudaSourceError(REFUSED["va_list"], self._now.line)
            kind = self._pointers(self._base())
            if self._is("("):
                raise CudaSourceError("pointers to functions are not supported", self._now.line)
            if self._now.kind == "name":
                name = self._name()
            else:
                name = Token("name", f"unnamed{len(found)}", self._now.line)
            kind = self._dimensions(kind)
            if isinstance(kind, ArrayOf):
                kind = PointerTo(kind.of)
            if self._is("="):
                raise CudaSourceError("default arguments are not supported", self._now.line)
            found.append(Param(kind, name.text, name.line))
            if not self._take(","):
                break
        self.expect(")")
        return found

    def _variable(self, unit: Unit, line: int, device: bool) -> None:
        found = self._declaration(line)
        for one in found.body if isinstance(found, Block) else [found]:
            assert isinstance(one, Declare)
            base: Written = one.type
            while isinstance(base, ArrayOf):
                base = base.of
            if one.shared or one.extern:
                if one.shared and one.extern:
                    unit.variables.append(one)
                    continue
                raise CudaSourceError(f"{one.name}: declare shared memory inside a kernel", one.line)
            if not (one.constant or one.constexpr or (isinstance(base, Named) and base.const)):
                raise CudaSourceError(
                    f"{one.name}: a global variable must be constant: pass a tensor instead", one.line
                )
            if one.init is None:
                raise CudaSourceError(
                    f"{one.name}: a constant needs a value in its declaration: give it one, or pass a tensor", one.line
                )
            unit.variables.append(one)
