"""Whether a connector class fits the interface that vLLM calls."""

import inspect
from collections.abc import Iterator
from typing import Any

VAR_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def misfits(connector_class: type, *interfaces: type) -> Iterator[str]:
    """Problems that vLLM would have when it calls ``connector_class`` in the way it calls
    ``interfaces``.

    A hook must be of the interface's kind (property, class method, method), and accept the
    interface's parameters by position and by keyword.
    """
    for interface in interfaces:
        for name in public_names(interface):
            wanted = inspect.getattr_static(interface, name)
            found = inspect.getattr_static(connector_class, name, None)
            if type(wanted) is not type(found):
                yield f"{name} is a {type(found).__name__}, not a {type(wanted).__name__}"
            elif not isinstance(wanted, property):
                yield from _refused(name, _signature(wanted), _signature(found))


def public_names(cls: type) -> list[str]:
    """The public attributes of a class, inherited ones too."""
    return [name for name in dir(cls) if not name.startswith("_")]


def _signature(attribute: Any) -> inspect.Signature:
    return inspect.signature(getattr(attribute, "__func__", attribute))


def _refused(name: str, wanted: inspect.Signature, found: inspect.Signature) -> Iterator[str]:
    parameters = [p for p in wanted.parameters.values() if p.kind not in VAR_KINDS]
    by_keyword = {p.name: p for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    calls: list[tuple[list[Any], dict[str, Any]]] = [
        ([p for p in parameters if p.kind is not p.KEYWORD_ONLY], {}),
        ([], by_keyword),
    ]
    required = {n: p for n, p in by_keyword.items() if p.default is p.empty}
    calls.append(([], required))
    if any(p.kind is p.VAR_KEYWORD for p in wanted.parameters.values()):
        calls.append(([], by_keyword | {"an_argument_of_another_version": None}))
    for arguments, keywords in calls:
        try:
            found.bind(*arguments, **keywords)
        except TypeError as error:
            yield f"{name}{found} does not take {arguments or ''}{sorted(keywords)}: {error}"
