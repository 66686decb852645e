"""Declare the proxy's classes to Cython, from their sources, for `hatch_build.py` (pure).

Cython leaves a Python class as it is: each attribute is looked up by its name, in the class and in
the object's dictionary. Of a class that is declared in a `.pxd` file it makes one of C's, whose
attributes have places in the object (docs/decisions/028-compiled.md).
"""

import ast
from collections.abc import Iterable, Iterator


def layouts(source: str) -> str:
    """Return the declarations, for Cython, of those classes of a module that can be C's.

    An attribute is then a place in the object instead of an entry of its dictionary, and a method
    finds it there without a look-up. Attributes that are not declared go to a dictionary as before.
    Only one thing differs: before it is set, an attribute is None instead of missing.
    """
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    declared = ((node.name, _places(node)) for node in classes if _is_plain(node))
    return "".join(_declaration(name, places) for name, places in declared if places)


def _is_plain(node: ast.ClassDef) -> bool:
    """Return whether a class has no bases, and no attribute that only its subclasses set."""
    if node.bases or node.keywords or node.decorator_list:
        return False
    promised = {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and statement.value is None
    }
    return promised <= set(_places(node))


def _places(node: ast.ClassDef) -> list[str]:
    """Return the attributes that a class's methods set, but for those that it has a value for."""
    own = set(_values(node))
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = (
        part.attr
        for method in methods
        if method.args.args
        for part in ast.walk(method)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == method.args.args[0].arg == "self"
    )
    return [name for name in dict.fromkeys(found) if name not in own]


def _values(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names that a class's body gives a value: its methods and constants."""
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            yield ast.unparse(statement.target)


def _declaration(name: str, places: Iterable[str]) -> str:
    # The first two: an instance may have further attributes, and be weakly referenced.
    members = ["dict __dict__", "object __weakref__", *(f"public object {one}" for one in places)]
    return f"cdef class {name}:\n" + "".join(f"    cdef {one}\n" for one in members) + "\n"
