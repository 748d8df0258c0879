"""Temporary: a greedy planner, until the real one is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from helmsman.api.plan import Plan, PlannedBundle, PlannedInstance, PlannedRole, PlannedWorker, Shortfall
from helmsman.api.scheduler import Job
from helmsman.controller.cluster_snapshot import ClusterSnapshot


def plan_jobs(
    snapshot: ClusterSnapshot,
    jobs: Sequence[Job],
    *,
    running: Sequence[PlannedRole] = (),
    of: Literal["available", "total"] = "available",
) -> Plan | Shortfall:
    kind = next((k for k in ("GPU", "NPU") if any(n.total.get(k) for n in snapshot.nodes)), "GPU")
    free = {n.node_id: dict(n.available if of == "available" else n.total) for n in snapshot.nodes}
    nodes = {n.node_id: n for n in snapshot.nodes}
    ids = {
        n.node_id: list(n.free_devices) if n.free_devices is not None else [str(i) for i in range(int(n.total.get(kind, 0)))]
        for n in snapshot.nodes
    }
    roles = []
    for job in sorted(jobs, key=lambda j: -j.spec(0).gpu):
        instances, bundles, workers = [], [], []
        for index in range(job.replicas):
            spec = job.spec(index)
            per = int(max((n.total.get(kind, 0) for n in snapshot.nodes), default=0))
            parts = [spec.gpu]
            if spec.ray_placement_strategy == "deferred" and per and spec.gpu > per:
                parts = [float(per)] * int(spec.gpu // per)
            mine = []
            for k, part in enumerate(parts):
                want = {"CPU": spec.cpu if k == 0 else 0.001, kind: part, "memory": spec.mem * 1e9, **spec.resources}
                want = {a: b for a, b in want.items() if b} or {"CPU": 0.001}
                order = list(nodes)
                if not part:
                    order.sort(key=lambda i: nodes[i].total.get(kind, 0))
                for i in order:
                    labels = spec.node_labels
                    if any(nodes[i].labels.get(a) != b for a, b in labels.items()):
                        continue
                    if any(b.node_id == i for b in mine):
                        continue
                    if all(free[i].get(a, 0) >= b for a, b in want.items()):
                        break
                else:
                    return Shortfall(role=job.role)
                for a, b in want.items():
                    free[i][a] -= b
                dev = tuple(ids[i][: int(part)])
                del ids[i][: int(part)]
                mine.append(PlannedBundle(node_id=i, node=nodes[i].address, resources=want, devices=dev))
            w = PlannedWorker(
                worker_id=f"{job.role}/{index}",
                node_id=mine[0].node_id,
                node=mine[0].node,
                bundle=index if spec.ray_placement_strategy == "shared" else 0,
                num_devices=int(parts[0]),
                devices=mine[0].devices,
            )
            if spec.ray_placement_strategy == "shared":
                bundles += mine
                workers.append(w)
            else:
                instances.append(PlannedInstance(index=index, bundles=tuple(mine), workers=(w,)))
        if bundles:
            instances = [PlannedInstance(index=0, bundles=tuple(bundles), workers=tuple(workers))]
        roles.append(PlannedRole(role=job.role, accelerator=kind if job.spec(0).gpu else "", instances=tuple(instances)))
    return Plan(roles=tuple(sorted(roles, key=lambda r: [j.role for j in jobs].index(r.role))))
