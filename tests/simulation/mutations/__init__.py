"""Bugs made on purpose, one file per subject. The simulation must catch each of them: a bug that it
misses shows a missing check."""

from importlib import import_module
from pkgutil import iter_modules

from tests.simulation.mutations.registry import Mutation

_SUBJECTS = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]

MUTATIONS: dict[str, Mutation] = {
    name: bug
    for subject in _SUBJECTS
    for name, bug in vars(subject).items()
    if isinstance(bug, Mutation)
}
"""By name."""
