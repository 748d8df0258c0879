"""Worker processes, relays that lose their connections, and fixtures of the contract suite."""

from tests.contract.conftest import gate, role  # noqa: F401 - fixtures
from tests.hostile.conftest import make_worker, proxy  # noqa: F401 - fixtures
