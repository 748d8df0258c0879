"""``ray start`` with a limit of our own for its raylet: ``python -m helmsman.controller._bootstrap.ray_patience start ...``.

Ray gives its raylet 30 s to register, a constant of its source (2.60). Here it is LIMIT_VARIABLE, which Ray itself reads as the
limit for its head. A raylet that has ended is not waited for: the supervisor detects that, and ends this process.
"""

from __future__ import annotations

import os
import time
from typing import Any

LIMIT_VARIABLE = "RAY_gcs_server_port_wait_time_s"
_POLL_S = 0.2


def main() -> None:
    """Run ``ray`` with this process's arguments and a longer wait for the raylet."""
    from ray._private import services as rays
    from ray.scripts import scripts

    services: Any = rays
    get_node = services.get_node
    deadline = time.monotonic() + float(os.environ.get(LIMIT_VARIABLE, "30"))

    def get_node_patiently(gcs_address: str, node_id: str) -> Any:
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError:  # as long as it has not registered
                if time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_S)

    services.get_node = get_node_patiently
    scripts.main()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
