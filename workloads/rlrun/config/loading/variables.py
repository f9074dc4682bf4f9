"""Variables of the environment that begin as fields do and are none: those of the processes themselves."""

from __future__ import annotations

from collections.abc import Mapping

_OPERATOR = "setting of the operator"
PROCESS_VARIABLES: Mapping[str, str] = {
    "RLRUN_API_KEY": "the secret that all roles of a run share",
    "RLRUN_ATTEMPT": "the attempt's number",
    "RLRUN_CONFIG": "a pod's configuration file",
    "RLRUN_CONFIG_MARK": "the fingerprint that the pod's file must have",
    "RLRUN_CRASHES": "folder of crash reports",
    "RLRUN_ENGINE": "what an engine's process is started with",
    "RLRUN_ENVIRONMENT_HUB": "index of a hub of environments",
    "RLRUN_ENVIRONMENT_MARK": "mark of an environment's processes",
    "RLRUN_ENVIRONMENT_SOCKETS": "sockets of environments in containers of their own",
    "RLRUN_ERROR_DIR": "folder of a role's error file",
    "RLRUN_GPU_LOCKS": "folder of the locks of this machine's GPUs",
    "RLRUN_LAUNCH_ID": "mark of the processes of one local launch",
    "RLRUN_MASTER_ADDR": "address of the trainer's first pod",
    "RLRUN_MASTER_PORT": "port of the trainer's rendezvous",
    "RLRUN_NAMESPACE": "namespace of a pod",
    "RLRUN_NNODES": "pods of the trainer",
    "RLRUN_NO_API_KEY": "name of a variable that is never set",
    "RLRUN_POD_IP": "address of a pod",
    "RLRUN_POD_NAME": "name of a pod",
    "RLRUN_POD_STATE": "folder that a pod's restarts share",
    "RLRUN_PROGRESS_LEASE": "Lease of the run's progress",
    "RLRUN_RESUME_REQUIRED": "set by a launcher that resumes a run: damaged checkpoints are an error",
    "RLRUN_REVISIONS": "folder of the commits of models and data that a run keeps to",
    "RLRUN_SHARED_ENVIRONMENTS_SOCKET": "socket of the container that environments without an image share",
    "RLRUN_STACKS_FILE": "file of stacks of a role that hangs",
    "RLRUN_TERMINATION_LOG": "file of a container's last message",
    "RLRUN_ASSIGNED_USERS": _OPERATOR,
    "RLRUN_CLUSTER_DOMAIN": _OPERATOR,
    "RLRUN_HTTP_PORT": _OPERATOR,
    "RLRUN_DEFAULTS_FOLDER": _OPERATOR,
    "RLRUN_DEFAULTS_NAME": _OPERATOR,
    "RLRUN_IMAGE_PULL_POLICY": _OPERATOR,
    "RLRUN_INFERENCE_IMAGE": _OPERATOR,
    "RLRUN_LEASE_NAME": _OPERATOR,
    "RLRUN_LOG_FORMAT": _OPERATOR,
    "RLRUN_LOG_LEVEL": _OPERATOR,
    "RLRUN_NETWORK": _OPERATOR,
    "RLRUN_OPERATOR_NAME": _OPERATOR,
    "RLRUN_ORCHESTRATOR_IMAGE": _OPERATOR,
    "RLRUN_POLICY": _OPERATOR,
    "RLRUN_QUEUE": _OPERATOR,
    "RLRUN_READ_NODES": _OPERATOR,
    "RLRUN_TRAINER_IMAGE": _OPERATOR,
    "RLRUN_WATCH_NAMESPACES": _OPERATOR,
}
"""Name of each with its meaning; no field has such a name."""
