"""Rank of this node, number of nodes and head, from flags and launcher variables.

Precedence: flags, RAY_ADDRESS (an existing cluster), variables specific to one launcher, then bare
RANK, WORLD_SIZE and MASTER_ADDR, which other launchers use to count processes. Nested launchers
(torchrun in Slurm) must agree. Nothing here inspects the machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from helmsman.api.errors import LauncherError


class Fact(msgspec.Struct, frozen=True):
    value: int | str
    said_by: str
    """Source, e.g. 'SLURM_NODEID=3' or '--node-rank 3'."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """Facts from one source; None for those that it lacks."""

    launcher: str
    rank: Fact | None = None
    count: Fact | None = None
    head: Fact | None = None
    processes_per_node: Fact | None = None
    """Processes that the launcher starts per node; more than one is rejected, since one process
    controls the node.
    """
    counts_processes: bool = False
    """Whether ``count`` is a number of processes, equal to the number of nodes at one process per
    node.
    """


class NodeIdentity(msgspec.Struct, frozen=True, kw_only=True):
    launcher: str
    """Source of the facts; 'this machine alone' without a source."""
    rank: int
    count: int
    head: str = ""
    """Host name or address of the head; '' on a head without a source for it, or with one node."""
    attach_to: str = ""
    """Address of an existing Ray cluster; nothing is started then."""
    said_by: Mapping[str, str] = {}

    def __str__(self) -> str:
        if self.attach_to or self.launcher == ALONE:
            return ": ".join(filter(None, (self.launcher, self.attach_to)))
        head = f", head {self.head}" if self.head else ""
        return f"{self.launcher}: node {self.rank} of {self.count}{head}"


ALONE = "this machine alone"
_FIELDS = {
    "rank": ("node rank", "--node-rank"),
    "count": ("number of nodes", "--num-nodes"),
    "head": ("head", "--head"),
}
"""Names and flags of the fields on which sources must agree."""


def identify_node(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    count: int | None = None,
    head: str | None = None,
) -> NodeIdentity:
    """Return this node's place in the run.

    Args:
        environ: Environment variables.
        rank: Value of --node-rank.
        count: Value of --num-nodes.
        head: Value of --head.

    Returns:
        The identity of the node.

    Raises:
        LauncherError: Sources disagree, a launcher starts several processes on a node, or a value
            is missing or invalid.
    """
    given = zip(_FIELDS.items(), (rank, count, head), strict=True)
    flags = {
        field: Fact(value, f"{flag} {value}")
        for (field, (_, flag)), value in given
        if value is not None
    }
    if not flags and (address := environ.get("RAY_ADDRESS", "")):
        return NodeIdentity(
            launcher="a Ray cluster that is there",
            rank=0,
            count=1,
            attach_to=address,
            said_by={"attach_to": f"RAY_ADDRESS={address}"},
        )
    found = [said for read in _LAUNCHERS if (said := read(environ))] or [
        said for said in [_generic(environ)] if said
    ]
    for said in found:
        if (tasks := said.processes_per_node) is not None and tasks.value != 1:
            sources = [
                f"{said.launcher}: {tasks.said_by}",
                "helmsman: one, which starts all others",
            ]
            raise _conflict("processes on a node", sources, "one process per node")
    facts = {
        field: fact for field in _FIELDS if (fact := flags.get(field) or _agreed(field, found))
    }
    if not facts:
        return NodeIdentity(launcher=ALONE, rank=0, count=1)
    return _complete(" in ".join(said.launcher for said in found) or "flags", facts)


def find_many_nodes(environ: Mapping[str, str]) -> Said | None:
    """Return the launcher that runs this process on one of several nodes; None otherwise.

    Several processes per node are allowed here. The innermost launcher with a count decides.
    """
    for read in (*_LAUNCHERS, _generic):
        try:
            said = read(environ)
            local = _number(environ, "LOCAL_WORLD_SIZE")
        except LauncherError:
            # Invalid variables do not imply another node; `helmsman up` and `doctor` report them.
            continue
        if said is None or said.count is None:
            continue
        if not said.counts_processes:
            return said if int(said.count.value) > 1 else None
        local = said.processes_per_node or local
        meets_here = said.head is not None and re.fullmatch(
            r"localhost|127\.[\d.]+|::1", str(said.head.value)
        )
        is_one = meets_here or int(said.count.value) <= (
            int(local.value) if local is not None else 1
        )
        return None if is_one else said
    return None


def _complete(launcher: str, facts: Mapping[str, Fact]) -> NodeIdentity:
    said_by = {field: fact.said_by for field, fact in facts.items()}
    rank, count, head = (facts[field].value if field in facts else None for field in _FIELDS)
    if rank is None and count == 1:
        rank = 0
    missing = [] if rank is not None else ["this node's rank (--node-rank)"]
    missing += [] if count is not None else ["the number of nodes (--num-nodes)"]
    if rank is not None and count is not None:
        number, total = int(rank), int(count)
        if not 0 <= number < total:
            missing = [f"a rank below the number of nodes: {said_by['rank']} of {said_by['count']}"]
        elif head is None and number > 0:
            missing = ["the head's address (--head)"]
        else:
            return NodeIdentity(
                launcher=launcher, rank=number, count=total, head=str(head or ""), said_by=said_by
            )
    raise _incomplete(launcher, missing, sorted(said_by.values()))


def _agreed(field: str, found: Sequence[Said]) -> Fact | None:
    said = {each.launcher: fact for each in found if (fact := getattr(each, field)) is not None}
    if len({fact.value for fact in said.values()}) > 1:
        name, flag = _FIELDS[field]
        raise _conflict(
            name, [f"{launcher}: {fact.said_by}" for launcher, fact in said.items()], flag
        )
    return next(iter(said.values()), None)


def _incomplete(launcher: str, missing: list[str], said: list[str]) -> LauncherError:
    return LauncherError(
        problem=f"{launcher} says {', '.join(said) or 'nothing more'}; missing is "
        f"{' and '.join(missing)}",
        said=said,
        step="Give it as a flag, the same way on every node",
    )


def _conflict(field: str, said: list[str], flag: str) -> LauncherError:
    return LauncherError(
        problem=f"sources disagree on the {field}: {'; '.join(said)}",
        said=said,
        step=f"Start helmsman with {flag}, which settles it, or without the variables of the "
        "launcher that is not meant",
    )


def _number(environ: Mapping[str, str], name: str) -> Fact | None:
    text = environ.get(name)
    if text is None or text == "":
        return None
    if not re.fullmatch(r"\d+", text.strip()):
        raise _incomplete(name, ["a number"], [f"{name}={text}"])
    return Fact(int(text), f"{name}={text}")


def _first_word(environ: Mapping[str, str], name: str) -> Fact | None:
    words = re.findall(r"[^\s,]+", environ.get(name, ""))
    if not words:
        return None
    return Fact(
        words[0], f"{name}={words[0]}" if len(words) == 1 else f"first of {name}: {words[0]}"
    )


class _Variables(msgspec.Struct, frozen=True):
    """A launcher that has a variable for each fact."""

    launcher: str
    rank: str
    count: str = ""
    head: str = ""
    processes_per_node: str = ""
    marker: str = ""
    """Variable that indicates the launcher; by default that of the rank."""
    unless: str = ""
    """Variable that indicates another launcher with the same facts."""
    counts_processes: bool = False

    def read(self, environ: Mapping[str, str]) -> Said | None:
        """Return the launcher's facts; None if it is not present."""
        if not environ.get(self.marker or self.rank) or self.unless in environ:
            return None
        return Said(
            launcher=self.launcher,
            rank=_number(environ, self.rank),
            count=_number(environ, self.count),
            head=_first_word(environ, self.head),
            processes_per_node=_number(environ, self.processes_per_node),
            counts_processes=self.counts_processes,
        )


def _slurm(environ: Mapping[str, str]) -> Said | None:
    if "SLURM_NODEID" not in environ or "SLURM_JOB_NUM_NODES" not in environ:
        return None
    count = _number(environ, "SLURM_STEP_NUM_NODES") or _number(environ, "SLURM_JOB_NUM_NODES")
    listed = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    nodes = environ.get(listed, "")
    head = Fact(first_host(nodes), f"{listed}={nodes}") if nodes else None
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # '8', '1(x3)', '2,1(x2)'
    first = re.match(r"\d+", per_node)
    tasks = Fact(int(first.group()), f"SLURM_STEP_TASKS_PER_NODE={per_node}") if first else None
    return Said(
        launcher="Slurm",
        rank=_number(environ, "SLURM_NODEID"),
        count=count,
        head=head,
        processes_per_node=tasks,
    )


def _volcano(environ: Mapping[str, str]) -> Said | None:
    tasks = [name[3:-6] for name in environ if re.fullmatch(r"VC_.+_HOSTS", name)]
    # With several tasks, this node's task is unknown, so flags must set count and head.
    names = (f"VC_{tasks[0]}_NUM", f"VC_{tasks[0]}_HOSTS") if len(tasks) == 1 else ("", "")
    return _Variables("Volcano", "VC_TASK_INDEX", *names).read(environ)


_LAUNCHERS: tuple[Callable[[Mapping[str, str]], Said | None], ...] = (
    _Variables(
        "Beaker", "BEAKER_REPLICA_RANK", "BEAKER_REPLICA_COUNT", "BEAKER_LEADER_REPLICA_HOSTNAME"
    ).read,
    _Variables(
        "torchrun", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "LOCAL_WORLD_SIZE"
    ).read,
    _Variables(
        "torchrun's PET variables",
        "PET_NODE_RANK",
        "PET_NNODES",
        "PET_MASTER_ADDR",
        marker="PET_NNODES",
        unless="GROUP_RANK",
    ).read,
    _Variables("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS").read,
    _volcano,
    _Variables("dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP").read,
    _Variables(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        processes_per_node="OMPI_COMM_WORLD_LOCAL_SIZE",
        counts_processes=True,
    ).read,
    _Variables("a Kubernetes Indexed Job", "JOB_COMPLETION_INDEX").read,
    _slurm,
)
"""Inner launchers before the launchers that may contain them."""

_generic = _Variables(
    "RANK and WORLD_SIZE (PAI-DLC)", "RANK", "WORLD_SIZE", "MASTER_ADDR", counts_processes=True
).read


_HOST = r"(?:[^,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"


def first_host(text: str) -> str:
    """Return the first host of a Slurm list: gpu001-a of 'gpu[001-003,007]-a,login'.

    Raises:
        LauncherError: The text is not a list of hosts.
    """
    if not re.fullmatch(rf"{_HOST}(,{_HOST})*", text):
        raise _incomplete("Slurm", ["a list of hosts"], [text])
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.match(_HOST, text)[0]).strip()  # type: ignore[index]
