"""Puts examples/ into the wheel below the package: `examples` could clash in site-packages."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TARGET = "simple_offload/bundled/examples"


class BundleExamples(BuildHookInterface[Any]):
    """A hatchling build hook. An editable installation finds examples/ beside the package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built; ``version`` is "editable" or "standard"."""
        if version != "editable":
            build_data["force_include"]["examples"] = TARGET
