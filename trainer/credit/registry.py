"""Find the implementations of an extension point: one in each module of a folder (pure)."""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any


def implementations(folder: ModuleType, attribute: str) -> dict[str, Any]:
    """Return the objects called `attribute` in the modules of `folder`, by the modules' names.

    Modules without such an object are passed over. Names are in alphabetical order.
    """
    names = sorted(module.name for module in iter_modules(folder.__path__))
    modules = {name: import_module(f"{folder.__name__}.{name}") for name in names}
    return {
        name: getattr(module, attribute)
        for name, module in modules.items()
        if hasattr(module, attribute)
    }
