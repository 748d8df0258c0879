"""The usual cause of each error and its fix, for the error catalogue."""

from __future__ import annotations

CAUSES: dict[str, tuple[str, str]] = {
    "InvalidSpecError": (
        "A misspelt or impossible field of `Job` or `SchedulingSpec`.",
        "Set the field as the message says.",
    ),
    "JobsFileError": (
        "A syntax error or unknown key in a file for `helmsman plan`.",
        "Correct the place that is named.",
    ),
    "RoleExistsError": (
        "`create_workers` ran twice for a role.",
        "Delete the role first, or choose another name.",
    ),
    "RoleNotFoundError": (
        "A typing error, or the role has been deleted.",
        "Use one of the names in the message.",
    ),
    "WorkerNotFoundError": (
        "An id of a worker that was removed.",
        "Use an id that `create_workers` returned.",
    ),
    "EngineNotFoundError": (
        "The engine was not created, has another name, or its worker was restarted.",
        "Create the engine again, or pass its name as `engine_name`.",
    ),
    "BackendNotInstalledError": (
        "An optional package is missing.",
        "Run the command in the message.",
    ),
    "UnknownBackendError": (
        "A typing error in `make_scheduler`.",
        "Use `ray`, `local` or `inline`.",
    ),
    "AmbiguousAddressError": (
        "Several Ray clusters are reachable.",
        "Give one `address`, or set `RAY_ADDRESS`.",
    ),
    "ClusterNotFoundError": (
        "The cluster has ended, or the address or port is wrong.",
        "Start a cluster, or use `address='local'`.",
    ),
    "ClusterNotUpError": (
        "The launcher started the script itself on every node.",
        "Start `helmsman up -- python script.py` on every node instead.",
    ),
    "NodesMissingError": (
        "Nodes are still starting, or failed to start.",
        "Read the log of the missing nodes.",
    ),
    "RayStartError": (
        "Too little memory, shared memory or processes, or a taken port.",
        "Run `helmsman doctor`, and read the log that is quoted.",
    ),
    "ClusterLostError": (
        "Ray's `gcs_server` or raylet was killed, often for memory.",
        "Make a new scheduler.",
    ),
    "LauncherError": (
        "Nested launchers disagree, or the variables do not identify the node.",
        "Give `--node-rank`, `--num-nodes` and `--head`.",
    ),
    "BootstrapError": (
        "A node did not join, was refused, or lost the head; the exit code says which.",
        "Look the exit code up in [launchers](launchers.md).",
    ),
    "PreflightError": (
        "A taken port, small `/dev/shm` or unusable address.",
        "Run `helmsman doctor` on the node.",
    ),
    "ClusterMismatchError": (
        "Another job uses the address.",
        "Choose other ports, or end the other cluster.",
    ),
    "PlacementInfeasibleError": (
        "The job asks for more than the cluster has.",
        "Apply the change in the message; `helmsman plan` tries jobs without starting them.",
    ),
    "PlacementTimeoutError": (
        "Another run holds the resources.",
        "Wait, end the other run, or raise `Timeouts.start_s`.",
    ),
    "WorkerStartError": (
        "The worker's process ended or hung before its first answer.",
        "Read the end of its log, which the message quotes.",
    ),
    "CallTimeoutError": (
        "The call is slow, or its ranks wait for each other.",
        "Look at the stack in the message; raise the limit, or delete the workers.",
    ),
    "WorkerFailedError": (
        "The process was killed (for memory, mostly), crashed, or ended itself.",
        "Look at the signal and the log; restart the worker, or use supervision and recovery.",
    ),
    "EngineExistsError": ("`create_engine` ran twice.", "Give the second engine another name."),
    "EngineImportError": (
        "The path is wrong, or the module is missing on the worker's node.",
        "Correct the path, or pass the class itself.",
    ),
    "EngineCreationError": (
        "The constructor raised.",
        "Read the traceback of the worker in the message.",
    ),
    "EngineCreationTimeoutError": (
        "The constructor takes longer than `Timeouts.create_engine_s`, or hangs.",
        "Look at the stack in the message; raise the limit if the model is only large.",
    ),
    "MethodNotFoundError": (
        "A typing error, or a private method.",
        "Use one of the names that are suggested.",
    ),
    "EngineCallError": (
        "The engine's method raised.",
        "Read the traceback; the original exception is `__cause__` where it can be pickled.",
    ),
    "ArgumentNotSerializableError": (
        "A lock, socket, generator or similar object in an argument.",
        "Pass plain data, and build the object in the engine.",
    ),
    "ArgumentNotLoadableError": (
        "The worker cannot import the type of an argument.",
        "Install the module on every node, or set `PYTHONPATH` in `env_vars`.",
    ),
    "ResultNotSerializableError": (
        "As for arguments, in what the method returned.",
        "Return plain data.",
    ),
    "PeerNotReadyError": (
        "Another rank of the group failed first.",
        "Look at the error of that rank.",
    ),
    "WorkerBacklogError": (
        "The worker is stopped, or is sent more than it can receive.",
        "Await earlier calls, or end the worker.",
    ),
    "HandleLostError": (
        "The value was released, or its worker has ended.",
        "Call the method again.",
    ),
    "InstanceLostError": (
        "A rollout worker has exited.",
        "Use `retries=RetryGeneration()` and supervision.",
    ),
    "RequestDeadlineError": (
        "The deadline is short, or requests wait long.",
        "Raise it, or add instances.",
    ),
    "RequestsInFlightError": (
        "A pause or drain waited for long generations.",
        "Wait again, or end the requests with `abort`.",
    ),
    "ServerStartError": (
        "A missing model or package, or too little device memory for the server.",
        "Read the end of the server's output in the message.",
    ),
    "ServerRequestError": (
        "The server does not know the route or an argument; often another version.",
        "Install a version from [supported versions](versions.md).",
    ),
    "FaultsUnsupportedError": ("A fault drill on the inline scheduler.", "Use `local` or `ray`."),
    "EpisodeTimeoutError": (
        "An episode waits for a tool or a long generation.",
        "Give its parts limits of their own.",
    ),
    "WorkflowFailuresError": (
        "The episode function is broken.",
        "Correct the last error, which the message has.",
    ),
    "EngineDeadError": (
        "A process of vLLM was killed or crashed.",
        "Use `supervision=SupervisionPolicy()`.",
    ),
    "ServerLostError": (
        "The inference server was killed or crashed.",
        "Use supervision and `RetryGeneration()`.",
    ),
    "RewardTimeoutError": (
        "A slow or hanging reward function.",
        "Raise the limit, or correct the function.",
    ),
    "RewardLostError": (
        "The reward function ended its process.",
        "Score again if the reward function has no side effects.",
    ),
    "RewardWorkersSpentError": ("The reward function kills every worker.", "Correct the function."),
    "RendezvousError": (
        "A firewall between nodes, or a taken port.",
        "Open `HELMSMAN_PORT_RANGE` between the nodes.",
    ),
    "GroupCallError": (
        "One rank failed; others failed because of it.",
        "Correct the first error, `error.first`.",
    ),
    "CheckpointError": (
        "An incomplete checkpoint, or one of another model.",
        "Load the previous checkpoint.",
    ),
    "DevicesNotOwnedError": (
        "A call in the turn of the other role.",
        "Hand the devices over first.",
    ),
    "DeviceMemoryError": (
        "Trainer and rollout do not fit on the device together.",
        "Reduce the role that holds most; the message lists what each holds.",
    ),
    "RecoveryExhaustedError": (
        "Ranks are lost again and again, for example for memory.",
        "Correct the cause, then start the script again; it continues from the checkpoint.",
    ),
    "DispatchError": (
        "Arguments or results do not fit the method's `@register`.",
        "Change the call or the declaration.",
    ),
    "UnevenBatchError": (
        "The batch does not divide over the ranks.",
        "Use a size that does, or `remainder='pad'`.",
    ),
    "TopologyMismatchError": (
        "The engine lays its ranks out otherwise than `ClusterConfig`.",
        "Use the same sizes in both.",
    ),
    "ParallelLayoutError": (
        "Parallel sizes that do not divide the model or the world.",
        "Choose sizes that divide it.",
    ),
    "ResourcesNotMetError": (
        "The cluster is smaller than the `ResourceManager` expects.",
        "Correct the counts.",
    ),
    "NotSerializableError": (
        "An object that pickle refuses, at the path that is named.",
        "Leave the field out.",
    ),
    "NotLoadableError": ("A type that cannot be imported here.", "Install its module."),
    "ProtocolError": (
        "Another program, or another version of Helmsman, at the port.",
        "Install the same version on all nodes.",
    ),
    "DeviceMismatchError": (
        "A device mask was changed in the worker.",
        "Remove the variable from `env_vars`.",
    ),
    "SchedulerClosedError": ("A call after the `with` block.", "Move the call into the block."),
    "ShutdownIncompleteError": (
        "A process ignores signals or waits for a disk, or an engine's `destroy` does not end.",
        "Run the command in the message.",
    ),
    "LogDirectoryError": ("A read-only or full directory.", "Pass another `log_dir`."),
    "UntrustedPathError": (
        "A file of another user at the path.",
        "Remove it, or pass another directory.",
    ),
}
"""Error -> its usual cause, and how to fix it."""
