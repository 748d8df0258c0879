"""Worker processes, and relays that lose their connections."""

from tests.hostile.conftest import make_worker, proxy  # noqa: F401 - fixtures
