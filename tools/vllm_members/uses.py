"""Uses: the members of vLLM that a file of ours uses. Types come from annotations, ours and vLLM's,
and follow assignments and loops; the rest is in a table."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.vllm_members.release import Class, Function, Member, Release, names_in

KNOWN = {
    "coordinator": ("vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator"),
    "manager": ("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager"),
    "managers": ("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager"),
    "_device_managers": ("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager"),
    "pool": ("vllm.v1.core.block_pool", "BlockPool"),
    "_device_pool": ("vllm.v1.core.block_pool", "BlockPool"),
    "block": ("vllm.v1.core.kv_cache_utils", "KVCacheBlock"),
    "spec": ("vllm.v1.kv_cache_interface", "KVCacheSpec"),
    "kv_cache_spec": ("vllm.v1.kv_cache_interface", "KVCacheSpec"),
    "request": ("vllm.v1.request", "Request"),
    "parallel": ("vllm.config.parallel", "ParallelConfig"),
    "vllm_config": ("vllm.config.vllm", "VllmConfig"),
    "kv_transfer_config": ("vllm.config.kv_transfer", "KVTransferConfig"),
}
"""By name of a variable or an attribute without an annotation, its class, or that of its items."""


@dataclass
class Use:
    """How our files use one member."""

    places: list[str] = field(default_factory=list)  # "file:line"
    is_called: bool = False
    """Also of methods that a class of ours overrides: vLLM calls those."""
    has_substitute: bool = False
    """Whether the file asks for it with ``getattr`` or ``hasattr``, or imports it in ``try``."""


class Uses:
    """``by_member``: what a file uses. A name has one type in a file."""

    def __init__(self, source: str, name: str, release: Release) -> None:
        """``release``: tells the types of vLLM's own members."""
        self.by_member: dict[Member, Use] = {}
        self._name = name
        self._release = release
        self._tree = ast.parse(source)
        self._imports: dict[str, Member] = {}
        self._types = {
            name: found for name, known in KNOWN.items() if (found := release.find_class(*known))
        }
        self._find_imports()
        self._find_types()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute):
                for owner in self._owners(node.value):
                    self._add(Member(owner, node.attr), node)
            elif isinstance(node, ast.Call):
                self._add_call(node)
            elif isinstance(node, ast.ClassDef):
                self._add_overridden(node)
        self._excuse_members_of_excused_classes()

    def _add(self, member: Member, node: ast.AST) -> Use:
        use = self.by_member.setdefault(member, Use())
        place = f"{self._name}:{getattr(node, 'lineno', 0)}"
        if place not in use.places:
            use.places.append(place)
        return use

    def _find_imports(self) -> None:
        tries = [node for node in ast.walk(self._tree) if isinstance(node, ast.Try)]
        excused = {
            id(node)
            for block in tries
            if any("ImportError" in names_in(handler.type) for handler in block.handlers)
            for node in ast.walk(block)
        }
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    member = Member(node.module or "", alias.name)
                    self._imports[alias.asname or alias.name] = member
                    self._add(member, node).has_substitute |= id(node) in excused

    def _add_call(self, node: ast.Call) -> None:
        """Of a function or class of vLLM, of a method, or of ``getattr`` and ``hasattr``."""
        function = node.func
        if isinstance(function, ast.Attribute):
            for owner in self._owners(function.value):
                self._add(Member(owner, function.attr), node).is_called = True
        elif isinstance(function, ast.Name) and function.id in self._imports:
            self._add(self._imports[function.id], node).is_called = True
        elif isinstance(function, ast.Name) and function.id in {"getattr", "hasattr"}:
            for owner in self._owners(node.args[0]):
                name = getattr(node.args[1], "value", None)
                self._add(Member(owner, str(name)), node).has_substitute = True

    def _add_overridden(self, node: ast.ClassDef) -> None:
        for base in (self._class_of(base) for base in node.bases):
            known = self._release.members(base) if base else {}
            for method in (m for m in node.body if isinstance(m, Function)):
                if base is not None and method.name in known and method.name != "__init__":
                    self._add(Member(base, method.name), method).is_called = True

    def _excuse_members_of_excused_classes(self) -> None:
        excused = {
            self._release.find_class(str(member.owner), member.name)
            for member, use in self.by_member.items()
            if use.has_substitute and isinstance(member.owner, str)
        }
        for member, use in self.by_member.items():
            use.has_substitute |= member.owner in excused

    # Types

    def _find_types(self) -> None:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.arg) and (found := self._class_of(node.annotation)):
                self._types[node.arg] = found
            elif isinstance(node, ast.AnnAssign) and (found := self._class_of(node.annotation)):
                self._types[_last_name(node.target)] = found
        num_known = -1
        while num_known != len(self._types):
            num_known = len(self._types)
            for node in ast.walk(self._tree):
                for target, value in _assignments(node):
                    if (found := self._type_of(value)) is not None:
                        self._types.setdefault(_last_name(target), found)

    def _class_of(self, annotation: ast.AST | None) -> Class | None:
        """The class of vLLM that an annotation of ours names, alone or in a container."""
        for name in names_in(annotation):
            if name in self._imports:
                member = self._imports[name]
                return self._release.find_class(str(member.owner), member.name)
        return None

    def _owners(self, value: ast.expr) -> Iterator[str | Class]:
        """The module that an expression names, or its class."""
        if isinstance(value, ast.Name) and value.id in self._imports:
            module = str(self._imports[value.id])
            if self._release.module(module) is not None:
                yield module
                return
        if (found := self._type_of(value)) is not None:
            yield found

    def _type_of(self, value: ast.expr) -> Class | None:
        """The class of an expression; of a container or a function, that of its items or answer."""
        found: Class | None = None
        match value:
            case ast.Name(id=name) if name in self._imports:
                member = self._imports[name]
                owner = str(member.owner)
                found = self._release.find_class(owner, member.name)
                if found is None and (defined := self._release.find(owner, member.name)):
                    found = self._annotated(defined[1], [defined[0]])
            case ast.Name(id=name):
                found = self._types.get(name)
            case ast.Attribute(value=expression, attr=name):
                if (of := self._type_of(expression)) is not None:
                    node = self._release.definition(Member(of, name))
                    found = self._annotated(node, [base.module for base in self._release.bases(of)])
                found = found or self._types.get(name)
            case ast.Subscript(value=expression) | ast.Call(func=expression):
                found = self._type_of(expression)
        return found

    def _annotated(self, node: ast.AST | None, modules: list[str]) -> Class | None:
        """The class that an annotation of vLLM's names, in one of these modules."""
        annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
        found = (
            self._release.find_class(m, name) for m in modules for name in names_in(annotation)
        )
        return next((each for each in found if each is not None), None)


def _assignments(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Targets and values of an assignment; of a loop, the value is the whole container."""
    if isinstance(node, ast.For | ast.comprehension):
        return [(node.target, node.iter)]
    if not isinstance(node, ast.Assign):
        return []
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def _last_name(target: ast.expr) -> str:
    return ast.unparse(target).rpartition(".")[2]


def uses_of(package: Path, release: Release, root: Path) -> dict[Member, Use]:
    """What all files of a package use. A member has a substitute if all files that use it have
    one. Names of files are relative to ``root``."""
    found: dict[Member, Use] = {}
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(root))
        for member, use in Uses(path.read_text(encoding="utf-8"), name, release).by_member.items():
            if release.definition(member) is None:
                continue  # of another version
            merged = found.setdefault(member, Use(has_substitute=True))
            merged.places += use.places
            merged.is_called |= use.is_called
            merged.has_substitute &= use.has_substitute
    return found
