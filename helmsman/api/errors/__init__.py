"""Every error that Helmsman raises, in one tree.

HelmsmanError
├── JobError (ValueError)                 the job as described can never start
│   ├── InvalidSpecError
│   ├── JobsFileError
│   └── RoleExistsError
├── NotFoundError (LookupError)           a name that is not registered
│   ├── WorkerNotFoundError
│   │   └── RoleNotFoundError
│   └── EngineNotFoundError
├── BackendError
│   ├── BackendNotInstalledError (ImportError)
│   ├── UnknownBackendError (ValueError)
│   ├── AmbiguousAddressError (ValueError)
│   ├── ClusterNotFoundError (ConnectionError)
│   ├── ClusterNotUpError (RuntimeError)
│   ├── NodesMissingError (TimeoutError)
│   ├── RayStartError
│   └── ClusterLostError (ConnectionError)  the Ray that a scheduler started has ended
├── LauncherError (ValueError)            flags and variables conflict, or do not identify this node
├── BootstrapError                        the cluster did not start, or this node must leave it
│   ├── PreflightError (ValueError)       this node does not meet the requirements
│   └── ClusterMismatchError (ConnectionError)  the cluster belongs to another run
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
│   │   └── EngineCreationTimeoutError    also a CallTimeoutError
│   ├── EngineCallError
│   │   └── MethodNotFoundError (AttributeError)
│   ├── ArgumentNotSerializableError (TypeError)
│   ├── ArgumentNotLoadableError
│   ├── ResultNotSerializableError (TypeError)
│   ├── PeerNotReadyError
│   ├── WorkerBacklogError                not sent: earlier requests still wait to be sent
│   └── HandleLostError (LookupError)
├── GenerationError                       one generation request
│   ├── InstanceLostError (ConnectionError)  its instance has exited or cannot be reached
│   ├── RequestDeadlineError (TimeoutError)
│   └── RequestsInFlightError (TimeoutError) requests did not end or return in time
├── ServerStartError                      an inference server did not become ready
├── ServerRequestError                    a server refused a request, or its answer is malformed
├── FaultsUnsupportedError                fault injection into the script's own process
├── EpisodeTimeoutError (TimeoutError)    an episode of a workflow took too long
├── WorkflowFailuresError                 too many episodes have failed
├── EngineDeadError (ConnectionError)     the processes that an engine started have ended
│   └── ServerLostError                   its inference server has ended, or the connection broke
├── RewardTimeoutError (TimeoutError)     a score of a RewardPool took too long
├── RewardLostError                       a score of a RewardPool was lost with its worker
├── RewardWorkersSpentError               a RewardPool has no worker and no restart left
├── RendezvousError (ConnectionError)     the ranks of a role cannot connect to rank 0
├── GroupCallError                        several ranks failed, root cause first
├── CheckpointError                       a checkpoint that cannot be loaded
├── DevicesNotOwnedError                  a call needs devices that another role owns now
├── DeviceMemoryError                     out of memory on devices that two roles share in turns
├── RecoveryExhaustedError                train workers were lost more often than allowed
├── DispatchError (TypeError)             arguments or results do not fit the dispatch mode
├── UnevenBatchError (ValueError)         rows that do not divide over the ranks
├── TopologyMismatchError                 workers report other coordinates than expected
├── ParallelLayoutError (ValueError)      sizes of a parallel layout that do not divide
├── ResourcesNotMetError                  the cluster lacks nodes or devices of a ResourceManager
├── CodecError                            a payload that cannot be packed or unpacked
│   ├── NotSerializableError (TypeError)
│   └── NotLoadableError
├── ProtocolError                         a peer broke the wire protocol or did not authenticate
├── PlatformError
│   └── DeviceMismatchError               a process sees other devices than it was granted
├── SchedulerClosedError
├── ShutdownIncompleteError
├── LogDirectoryError (OSError)           the log directory of a run cannot be created or used
└── UntrustedPathError (PermissionError)  a file or directory that another user may have planted

To add an error, subclass the branch it belongs to and declare its fields as annotations. Set the
message as ``template``, with the next step for the user last, or compute it in ``describe()``. Add
the class to the tree above and a row to the table in tests/unit/api/test_errors.py. Fields must be
picklable: unpickling restores the message and ``__dict__`` without calling ``__init__``.
"""

from helmsman.api.errors._base import HelmsmanError as HelmsmanError
from helmsman.api.errors._base import signal_name as signal_name
from helmsman.api.errors._calls import *
from helmsman.api.errors._jobs import *
from helmsman.api.errors._runs import *
