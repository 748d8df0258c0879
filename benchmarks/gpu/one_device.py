"""Training by ranks that share one device, which NCCL refuses."""

from __future__ import annotations

from helmsman.api.platforms import current_platform
from helmsman.engines.train import FSDPTrainEngine


class GlooTrainEngine(FSDPTrainEngine):
    """Rank whose collectives go by gloo for tensors of the device, too, through the host."""

    def create_process_group(self) -> None:
        """Join a group of gloo; the base class then uses that one."""
        import torch.distributed as dist

        if not dist.is_initialized():
            current_platform.set_device(0)
            kinds = dict.fromkeys(("cpu", current_platform.device_type))
            dist.init_process_group(",".join(f"{kind}:gloo" for kind in kinds))
        super().create_process_group()
