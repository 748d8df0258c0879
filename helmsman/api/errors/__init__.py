"""Every error that Helmsman raises, in one tree.

HelmsmanError
├── JobError (ValueError)                 the job as described can never start
│   ├── InvalidSpecError
│   ├── JobsFileError
│   └── RoleExistsError
├── NotFoundError (LookupError)           a name that this scheduler does not know
│   ├── RoleNotFoundError
│   ├── WorkerNotFoundError
│   └── EngineNotFoundError
├── BackendError
│   ├── BackendNotInstalledError (ImportError)
│   ├── UnknownBackendError (ValueError)
│   ├── AmbiguousAddressError (ValueError)
│   ├── ClusterNotFoundError (ConnectionError)
│   ├── ClusterNotUpError (RuntimeError)
│   ├── NodesMissingError (TimeoutError)
│   ├── RayStartError
│   └── ClusterLostError (ConnectionError)  the Ray that a scheduler has started has ended
├── LauncherError (ValueError)            flags and variables conflict, or do not identify this node
├── BootstrapError                        no cluster, or one to be left; see BootstrapExit
│   ├── PreflightError (ValueError)       this node cannot take part as it is
│   └── ClusterMismatchError (ConnectionError)  the cluster at this address is of another run
├── StartError                            nothing of the job remains when one of these is raised
│   ├── PlacementInfeasibleError
│   ├── PlacementTimeoutError (TimeoutError)
│   └── WorkerStartError
├── CallError                             one call to one worker
│   ├── CallTimeoutError (TimeoutError)
│   ├── WorkerFailedError
│   ├── EngineExistsError
│   ├── EngineImportError (ImportError)
│   ├── EngineCreationError
│   ├── MethodNotFoundError (AttributeError)
│   ├── EngineCallError
│   ├── ArgumentNotSerializableError (TypeError)
│   ├── ArgumentNotLoadableError
│   ├── ResultNotSerializableError (TypeError)
│   ├── PeerNotReadyError
│   ├── WorkerBacklogError                not sent: the worker has not taken what came before
│   └── HandleLostError (LookupError)
├── GenerationError                       one generation request
│   ├── InstanceLostError (ConnectionError)  its instance has exited or cannot be reached
│   ├── RequestDeadlineError (TimeoutError)
│   └── RequestsInFlightError (TimeoutError) they did not end, or were not returned, in time
├── ServerStartError                      an inference server did not get ready
├── ServerRequestError                    a server refused a request, or its answer cannot be read
├── FaultsUnsupportedError                workers that share the process of the script
├── EpisodeTimeoutError (TimeoutError)    an episode of a workflow took too long
├── WorkflowFailuresError                 too many episodes have failed
├── EngineDeadError (ConnectionError)     the processes that an engine started have ended
│   └── ServerLostError                   its inference server has ended, or the connection broke
├── RewardTimeoutError (TimeoutError)     a score of a RewardPool took too long
├── RewardLostError                       a score of a RewardPool was lost with its worker
├── RewardWorkersSpentError               a RewardPool has no worker left, and may restart none
├── RendezvousError (ConnectionError)     the ranks of a role cannot meet at the master's address
├── GroupCallError                        several ranks failed, root cause first
├── CheckpointError                       a checkpoint that cannot be loaded
├── DevicesNotOwnedError                  a call needs devices that another role owns now
├── DeviceMemoryError                     devices without room, on which two roles take turns
├── RecoveryExhaustedError                train workers were lost more often than is tolerated
├── DispatchError (TypeError)             arguments or results unfit for how a method is dispatched
├── UnevenBatchError (ValueError)         rows that do not divide over the ranks
├── TopologyMismatchError                 workers see other coordinates than the controller
├── ParallelLayoutError (ValueError)      sizes of a parallel layout that do not divide
├── ResourcesNotMetError                  the cluster lacks what a ResourceManager expects
├── CodecError                            a payload that cannot be packed or unpacked
│   ├── NotSerializableError (TypeError)
│   └── NotLoadableError
├── ProtocolError                         a peer broke the wire protocol or failed to prove itself
├── PlatformError
│   ├── DeviceMismatchError               a process that does not see the devices granted to it
│   └── PlatformPicklingError (TypeError)
├── SchedulerClosedError
├── ShutdownIncompleteError
├── LogDirectoryError (OSError)           the log directory of a run cannot be made or used
└── UntrustedPathError (PermissionError)  a file or directory that another user may have planted

To add an error: subclass the branch it belongs to, declare its fields as annotations and its
message as ``template``, with the next step for the user last; or compute the message in
``describe()``. Draw it in the tree above, and give the table in tests/api/test_errors.py a row.
Fields must be picklable: errors are rebuilt from their message and ``__dict__``, without
``__init__``.
"""

from helmsman.api.errors._base import HelmsmanError as HelmsmanError
from helmsman.api.errors._base import signal_name as signal_name
from helmsman.api.errors._calls import *
from helmsman.api.errors._jobs import *
from helmsman.api.errors._runs import *
