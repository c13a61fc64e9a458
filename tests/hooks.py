"""Whether a connector class fits the interface that vLLM calls."""

import inspect
from collections.abc import Iterator
from typing import Any


def public_names(cls: type) -> set[str]:
    """The public attributes of a class, inherited ones too."""
    return {name for name in dir(cls) if not name.startswith("_")}


def misfits(connector_class: type, *interfaces: type) -> Iterator[str]:
    """Problems that vLLM would have when it calls ``connector_class`` in the way it calls
    ``interfaces``: a hook must be of the interface's kind (property, class method, method), and
    have its parameters, with defaults where it has them."""
    for interface in interfaces:
        for name in sorted(public_names(interface)):
            wanted = inspect.getattr_static(interface, name)
            found = inspect.getattr_static(connector_class, name, None)
            if type(wanted) is not type(found):
                yield f"{name} is a {type(found).__name__}, not a {type(wanted).__name__}"
            elif not isinstance(wanted, property):
                ours, theirs = _parameters(found), _parameters(wanted)
                if ours != theirs:
                    yield f"{name} has parameters {ours}, not {theirs}"


def _parameters(attribute: Any) -> list[tuple[str, str, bool]]:
    """Name and kind of each parameter, and whether it has a default."""
    signature = inspect.signature(getattr(attribute, "__func__", attribute))
    return [
        (each.name, each.kind.name, each.default is not each.empty)
        for each in signature.parameters.values()
    ]
