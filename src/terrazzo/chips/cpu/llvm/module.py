"""One LLVM module: its functions, declarations, constants and metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from terrazzo.chips.cpu.llvm.helpers import helpers
from terrazzo.chips.cpu.llvm.values import Val, const

if TYPE_CHECKING:
    from terrazzo.chips.cpu.llvm.instructions import Instructions


class Module:
    """Collects functions, declarations, constants and metadata of one LLVM module.

    `features` are LLVM's names of what the processor has (a ChipSpec's features); writers of code
    may use the instructions they promise, and must do without them when the set is empty.
    """

    def __init__(self, features: frozenset[str] = frozenset()) -> None:
        self.features = features
        self._builders: dict[str, Instructions] = {}
        self._declarations: dict[str, str] = {}
        self._globals: dict[str, str] = {}
        self._constants: dict[tuple[str, str, int], Val] = {}
        self._metadata: list[str] = []
        self._metadata_ids: dict[str, str] = {}
        self._aliases = 0

    def define(self, builder: Instructions) -> None:
        """Adds a function; its builder may still be writing to it."""
        if builder.name in self._builders:
            raise ValueError(f"function @{builder.name} is defined twice in one module")
        self._builders[builder.name] = builder

    def defines(self, name: str) -> bool:
        """Whether a function of this name has been added."""
        return name in self._builders

    def declare(self, name: str, ret: str, params: Sequence[str], attrs: str = "") -> None:
        """Declares a function once; a definition in the module takes precedence."""
        if name not in self._declarations:
            text = f"declare {ret} @{name}({', '.join(params)}) {attrs}"
            self._declarations[name] = text.rstrip()

    def declares(self, name: str) -> bool:
        """Whether a function from outside is called."""
        return name in self._declarations

    def constant(self, ty: str, initial: str, align: int = 64) -> Val:
        """A private constant in memory; equal constants are shared. Returns its address."""
        key = (ty, initial, align)
        found = self._constants.get(key)
        if found is None:
            name = f"const.{len(self._constants)}"
            self._globals[name] = (
                f"@{name} = private unnamed_addr constant {ty} {initial}, align {align}"
            )
            found = self._constants[key] = Val("ptr", (f"@{name}",))
        return found

    def table(self, elem: str, values: Sequence[int | float], align: int = 64) -> Val:
        """A private constant array of literals. Returns its address."""
        items = ", ".join(f"{elem} {const(elem, value).text}" for value in values)
        return self.constant(f"[{len(values)} x {elem}]", f"[{items}]", align)

    def data(self, content: bytes, align: int = 64) -> Val:
        """A private constant of raw bytes. Returns its address."""
        escaped = "".join(f"\\{byte:02X}" for byte in content)
        return self.constant(f"[{len(content)} x i8]", f'c"{escaped}"', align)

    def global_(
        self, name: str, ty: str, initial: str, linkage: str = "internal", align: int = 64
    ) -> Val:
        """A variable in memory. Returns its address."""
        text = f"@{name} = {linkage} global {ty} {initial}, align {align}"
        if self._globals.setdefault(name, text) != text:
            raise ValueError(f"global @{name} is defined twice, differently")
        return Val("ptr", (f"@{name}",))

    def metadata(self, text: str) -> str:
        """The number of the metadata node with this text, such as '!{i32 1}'."""
        found = self._metadata_ids.get(text)
        if found is None:
            found = self._metadata_ids[text] = self._add_metadata(text)
        return found

    def loop_metadata(self, hoist: bool = True) -> str:
        """Metadata for back edges that keeps LLVM from unrolling: our loops are already shaped."""
        key = "loop" if hoist else "loop without hoisting"
        found = self._metadata_ids.get(key)
        if found is None:
            names = ["llvm.loop.unroll.disable", *([] if hoist else ["llvm.licm.disable"])]
            disable = ", ".join([self.metadata(f'!{{!"{name}"}}') for name in names])
            number = len(self._metadata)
            found = self._add_metadata(f"distinct !{{!{number}, {disable}}}")
            self._metadata_ids[key] = found
        return found

    def alias_domain(self, count: int) -> list[str]:
        """Instruction suffixes for `count` memory areas that never overlap (scoped noalias)."""
        self._aliases += 1
        domain = self._add_metadata(f'distinct !{{!"memory {self._aliases}"}}')
        scopes = [
            self._add_metadata(f'distinct !{{!"area {self._aliases}.{i}", {domain}}}')
            for i in range(count)
        ]
        suffixes = []
        for i, scope in enumerate(scopes):
            own = self.metadata(f"!{{{scope}}}")
            others = ", ".join(other for k, other in enumerate(scopes) if k != i)
            suffix = f", !alias.scope {own}"
            suffixes.append(
                suffix + (f", !noalias {self.metadata(f'!{{{others}}}')}" if others else "")
            )
        return suffixes

    def _add_metadata(self, text: str) -> str:
        self._metadata.append(text)
        return f"!{len(self._metadata) - 1}"

    def text(self) -> str:
        """The whole module as LLVM IR."""
        lines = list(self._globals.values())
        lines += [text for name, text in self._declarations.items() if name not in self._builders]
        lines += [builder.text() for builder in self._builders.values()]
        lines += helpers("\n".join(lines))
        lines += [f"!{i} = {text}" for i, text in enumerate(self._metadata)]
        return "\n".join(lines) + "\n"
