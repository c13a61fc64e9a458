import pytest

from tests.engine.runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The engines of this session, each run when first asked for."""
    return Runs(tmp_path_factory.mktemp("engine"))
