"""Wheels that tests read from: fetched once, with a clear error on failure."""

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.wheels import UnavailableError, Wheel

INFO = "small_thing-1.0.dist-info"
FILES = {
    "small_thing/__init__.py": "",
    "small_thing/compiled.so": "",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: small-thing\nVersion: 1.0\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/RECORD": "",
}


def test_needed_files_are_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "small_thing-1.0-py3-none-any.whl", "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wheel = Wheel(
        "small-thing",
        "1.0",
        tmp_path / "cache" / "small",
        download_mb=1,
        download_seconds=60,
        without="--ignore=tests/small",
        needed=lambda file: not file.endswith(".so"),
    )
    folder = wheel.fetch()
    found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert found == FILES.keys() - {"small_thing/compiled.so"}
    assert sorted(path.name for path in folder.parent.iterdir()) == ["small", "small.lock"]
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert wheel.fetch() == folder
    missing = replace(wheel, version="2.0", folder=tmp_path / "cache" / "other")
    with pytest.raises(UnavailableError) as caught:
        missing.fetch()
    for part in ("small-thing==2.0", "(1 MB, once)", "make test ARGS='--ignore=tests/small'"):
        assert part in str(caught.value)
    assert not missing.folder.exists()
