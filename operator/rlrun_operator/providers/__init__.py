"""External queues that admit runs: the objects that the operator writes for them, and their meaning for a run. Pure.

Each provider has a module with the same functions: `next_step` decides from a run and its object on the next write and on the answer to
the run's decisions, and `ignored_field` names a field of the manifest without effect. `kueue` has its object in `kueue_workload`, and
`volcano` in its own module. `queue_answers` has the types of all providers, and the parts that their objects have in common.
"""

from collections.abc import Callable, Mapping

from rlrun.api.resource import RLRunSpec
from rlrun_operator.providers import kueue, volcano
from rlrun_operator.settings import Provider


def _ignored_without_provider(spec: RLRunSpec) -> str:
    if not spec.queue_name:
        return ""
    return f"ignored: queueName {spec.queue_name}, because neither Kueue nor Volcano is this operator's queue (queue.provider)"


_IGNORED: Mapping[Provider, Callable[[RLRunSpec], str]] = {
    "kueue": kueue.ignored_field,
    "volcano": volcano.ignored_field,
}


def ignored_field(provider: Provider, spec: RLRunSpec) -> str:
    """Return the message about a field of a valid specification that the queue of this operator does not use, or an empty string."""
    return _IGNORED.get(provider, _ignored_without_provider)(spec)
