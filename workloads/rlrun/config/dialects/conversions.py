"""Conversions of another project's values. Each conversion is total: it passes on unknown values, and the field refuses them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from rlrun.config.dialects.rows import (
    ALL_TASKS,
    Conversion,
    Effect,
    Extend,
    Later,
    Note,
    Refuse,
    Set,
    is_count,
    is_nothing,
    is_number,
    show_value,
)

TEMPLATE_ARGUMENT = "template argument "
"""Prefix of hints with arguments of the chat template."""


def if_set(value: object, target: str) -> Iterator[Effect]:
    """Set the value, unless it means none, which is the default here."""
    if not is_nothing(value):
        yield Set(target, value)


def table_present(value: object, target: str) -> Iterator[Effect]:
    """Set an empty table for a table whose keys have their own rows; false means null, and the field refuses other values."""
    if not is_nothing(value):
        yield Set(target, {} if isinstance(value, Mapping) else None if value is False else value)


def samples_or_none(value: object, target: str) -> Iterator[Effect]:
    """Convert a switch into a count: off is 0, on the default."""
    if value is not True:
        yield Set(target, 0 if value is False else value)


def all_tokens(value: object, target: str) -> Iterator[Effect]:
    """Convert `top_k`: -1 means all tokens, which is 0 here."""
    if not is_nothing(value):
        yield Set(target, 0 if value == -1 and not isinstance(value, bool) else value)


def defer_value(name: str) -> Conversion:
    """Return the conversion that keeps the value as a hint for `complete`."""

    def convert_value(value: object, _target: str) -> Iterator[Effect]:
        if not is_nothing(value):
            yield Later(name, value)

    return convert_value


def note_dropped(text: str) -> Conversion:
    """Return the conversion that reports a value without a field, because the value may change sampling."""

    def convert_value(value: object, _target: str) -> Iterator[Effect]:
        if not is_nothing(value):
            yield Note(f"got {show_value(value)}: {text}")

    return convert_value


def map_choice(names: Mapping[str | bool, object], otherwise: str = "") -> Conversion:
    """Return the conversion of choices to our names. Without `otherwise`, the field refuses unknown choices."""

    def convert_value(value: object, target: str) -> Iterator[Effect]:
        if isinstance(value, str | bool) and value in names:
            yield Set(target, names[value])
        elif not is_nothing(value):
            yield Refuse(f"got {show_value(value)}; {otherwise}") if otherwise else Set(target, value)

    return convert_value


def only_values(allowed: Iterable[object], why: str, otherwise: str) -> Conversion:
    """Return the conversion that ignores the allowed values, which have no effect here, and refuses all others."""
    known = tuple(allowed)

    def convert_value(value: object, _target: str) -> Iterator[Effect]:
        if any(value == each and type(value) is type(each) for each in known) or is_nothing(value):
            yield Note(f"ignored: {why}")
        else:
            yield Refuse(f"got {show_value(value)}; {otherwise}")

    return convert_value


def table_as(yes: object) -> Conversion:
    """Return the conversion of a table or `true` to `yes`; `false` and none mean the default."""

    def convert_value(value: object, target: str) -> Iterator[Effect]:
        if isinstance(value, dict) or value is True:
            yield Set(target, yes)
        elif value is not False and not is_nothing(value):
            yield Set(target, value)

    return convert_value


def read_flag(value: object, target: str) -> Iterator[Effect]:
    """Convert a table or `true` to true, and none or `false` to false."""
    yield Set(target, True if isinstance(value, dict) else False if is_nothing(value) else value)


def read_place(value: object, target: str) -> Iterator[Effect]:
    """Set a model or data set by name: a hub repository, or a folder if the name looks like a path."""
    if isinstance(value, str) and (value.startswith((".", "/", "~")) or value.count("/") > 1):
        yield Set(f"{target.rpartition('.')[0]}.path", value.removeprefix("./"))
    else:
        yield Set(target, value)


def step_to_resume(value: object, target: str) -> Iterator[Effect]:
    """Convert `resume_step`: -1 is the latest checkpoint, another number is that step."""
    if is_nothing(value):
        return
    if value == -1 and not isinstance(value, bool):
        yield Set(f"{target}.policy", "Latest")
    else:
        yield Set(f"{target}.policy", "Step")
        yield Set(f"{target}.step", value)
    yield Later("resume", True)


def run_name(value: object, target: str) -> Iterator[Effect]:
    """Convert a name to the form of a run's name."""
    if isinstance(value, str):
        name = re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-")[:40].strip("-")
        yield Set(target, name if name[:1].isalpha() else f"run-{name}"[:40].strip("-"))
    elif not is_nothing(value):
        yield Set(target, value)


def read_harness(value: object, _target: str) -> Iterator[Effect]:
    """Accept only the chat loop as the program that plays the agent's part; programs in a sandbox are not supported."""
    name = value.get("id") if isinstance(value, dict) else value
    if is_nothing(name) or name in ("null", "default"):
        yield Note("ignored: the orchestrator's chat loop is the agent")
    else:
        yield Refuse(
            f"got {show_value(name)}, which is not supported: the agent is the orchestrator's chat loop, not a program in a sandbox"
        )


def all_or(value: object, target: str) -> Iterator[Effect]:
    """Convert a number of tasks; -1 means all tasks."""
    if value == -1 and not isinstance(value, bool):
        yield Set(target, ALL_TASKS)
    elif not is_nothing(value):
        yield Set(target, value)


def targets_of_lora(value: object, target: str) -> Iterator[Effect]:
    """Convert names of modules. The usual set is the default, which includes `experts`."""
    if isinstance(value, str):
        value = [value]
    usual = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        if set(value) - {"experts"} == usual:
            return
        if "experts" in value:
            yield Note(
                "experts has no adapter of its own here: write the names of the experts' layers, such as gate_proj"
            )
            value = [name for name in value if name != "experts"]
    yield Set(target, value)


def environment_id(value: object, target: str) -> Iterator[Effect]:
    """Convert the id of a verifiers environment to its installed name, without owner and version."""
    if not isinstance(value, str) or ":" in value:
        yield Set(target, value)
        return
    name = value.partition("@")[0].rpartition("/")[2]
    yield Set(target, f"verifiers:{name}")


def environment_ids(value: object, target: str) -> Iterator[Effect]:
    """Set environments from a list of ids, or from a text with commas."""
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, list) and names and all(isinstance(name, str) and name.strip() for name in names):
        for i, name in enumerate(names):
            yield from environment_id(name.strip(), f"{target}[{i}].id")
    elif not is_nothing(value):
        yield Refuse(f"got {show_value(value)}, expected ids of environments, separated by commas")


def policy_steps(value: object, target: str) -> Iterator[Effect]:
    """Set the steps of the policies to evaluate, from a list or from a text with commas."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}(,\d{1,9})*", value):
        value = [int(part) for part in value.split(",")]
    if is_count(value):
        value = [value]
    if not is_nothing(value):
        yield Set(target, value)
        yield Later("eval_steps", value)


def own_server(value: object, _target: str) -> Iterator[Effect]:
    """Ignore the address of an engine of one's own in training; refuse the address of a hosted API."""
    urls = value if isinstance(value, list) else [value]
    hosted = [url for url in urls if isinstance(url, str) and url.startswith("https://")]
    if hosted:
        yield Refuse(
            f"got {show_value(hosted[0])}; training needs token ids, log-probs and changeable weights, which other servers do not provide: "
            "the run starts its own engines, or uses those of the option --engine-url (eval and synthesize can use any server)"
        )
    else:
        yield Note("ignored: the run starts its own engines, or uses those of the option --engine-url")


def of_chat(value: object, _target: str) -> Iterator[Effect]:
    """Accept only OpenAI's chat completions as the kind of a server's API."""
    if isinstance(value, str) and value.startswith(("openai_chat", "vllm", "openai")) and value != "openai_completions":
        yield Note("ignored: requests are OpenAI's chat completions")
    else:
        yield Refuse(f"got {show_value(value)}, which is not supported: requests are OpenAI's chat completions")


def read_taskset(value: object, target: str) -> Iterator[Effect]:
    """Convert a taskset of verifiers 0.4: its id, and the other keys as its own configuration."""
    if not isinstance(value, dict):
        yield Refuse(f"got {show_value(value)}, expected a table with an id")
        return
    place = target.rpartition(".")[0]
    if "id" in value:
        yield from environment_id(value["id"], target)
    if rest := {name: item for name, item in value.items() if name != "id"}:
        yield Set(f"{place}.args.taskset", rest)


def loss_roles(value: object, target: str) -> Iterator[Effect]:
    """Convert switches per role to the list of roles that are trained on."""
    if not isinstance(value, dict) or not all(isinstance(switch, bool) for switch in value.values()):
        yield Set(target, value)
    else:
        yield Set(target, [role for role, switch in ({"assistant": True} | value).items() if switch])


def read_transport(value: object, target: str) -> Iterator[Effect]:
    """Convert `nccl` and `filesystem`."""
    names = {"nccl": "NCCL", "filesystem": "Filesystem"}
    if isinstance(value, str) and value not in names:
        yield Refuse(f"got {show_value(value)}, expected nccl or filesystem")
    else:
        yield Set(target, names[value] if isinstance(value, str) else value)


def server_flag(name: str) -> Conversion:
    """Return the conversion to an argument of vLLM's server: `--name=value`, `--name`, or `--no-name`."""

    def convert_value(value: object, target: str) -> Iterator[Effect]:
        if isinstance(value, bool):
            yield Extend(target, [f"--{name}" if value else f"--no-{name}"])
        elif isinstance(value, str | int | float) and not is_nothing(value):
            yield Extend(target, [f"--{name}={value}"])
        elif not is_nothing(value):
            yield Refuse(f"got {show_value(value)}, expected one value, as on vLLM's command line")

    return convert_value


def tool_parser(value: object, target: str) -> Iterator[Effect]:
    """Set a tool-call parser, which vLLM needs together with a second flag. `auto` is not supported."""
    if value == "auto":
        yield Refuse("auto is not supported: write the model's parser, such as hermes")
    elif isinstance(value, str) and not is_nothing(value):
        yield Extend(target, ["--enable-auto-tool-choice", f"--tool-call-parser={value}"])
    elif not is_nothing(value):
        yield Refuse(f"got {show_value(value)}, expected the name of a parser, such as hermes")


def read_filters(value: object, target: str) -> Iterator[Effect]:
    """Convert a list of filters, each with its type. Filters that only measure need no field, because all of this is measured."""
    if not isinstance(value, list):
        yield Refuse(f"got {show_value(value)}, expected a list of tables")
        return
    for item in value:
        kind = item.get("type") if isinstance(item, dict) else None
        acts = isinstance(item, dict) and (item.get("enforce") is True or item.get("action") in ("drop", "mask"))
        if kind in ("zero_advantage", "zero_variance"):
            yield Set(f"{target}.zero_variance", acts)
        elif kind in ("gibberish", "repetition"):
            yield Set(f"{target}.{kind}_mask", acts)
            if kind == "repetition" and acts and "window" in item:
                yield Set(f"{target}.repetition_window", item["window"])
        else:
            yield Refuse(f"filter {show_value(kind)} is not supported; known: zero_advantage, gibberish, repetition")


def read_gates(value: object, target: str) -> Iterator[Effect]:
    """Convert the named gates of a curriculum. A group whose advantages are all 0 is replaced by another group."""
    if not isinstance(value, dict) or not all(isinstance(gate, dict) for gate in value.values()):
        yield Refuse(f"got {show_value(value)}, expected tables by name")
        return
    for name, gate in value.items():
        bounds = (gate.get("reject_min", 0), gate.get("reject_max", 0))
        if gate.get("type", "advantage_range") == "advantage_range" and bounds == (0, 0):
            yield Set(target, True)
        else:
            yield Refuse(
                f"gate {name} has an unsupported kind; algorithm.filters.zeroVariance drops groups of equal rewards"
            )


def loss_option(loss: str, option: str) -> Conversion:
    """Return the conversion of a loss's option, which also selects the loss."""

    def convert_value(value: object, target: str) -> Iterator[Effect]:
        yield Set(f"{target}.name", loss)
        yield Set(f"{target}.options.{option}", value)

    return convert_value


def read_objective(names: Mapping[str, Mapping[str, object]], known: str, table: str = "") -> Conversion:
    """Return the conversion of a named algorithm to our fields below `table`; `known` lists the names for the refusal of others."""

    def convert_value(value: object, _target: str) -> Iterator[Effect]:
        if isinstance(value, str) and value in names:
            yield from (Set(f"{table}.{path}" if table else path, setting) for path, setting in names[value].items())
        elif value == "sft":
            yield Refuse(
                "got 'sft'; rollouts come from the policy itself: rlrun synthesize writes rollouts of a teacher for supervised fine-tuning"
            )
        elif not is_nothing(value):
            yield Refuse(f"got {show_value(value)}, which is not supported; known: {known}")

    return convert_value


def read_algorithms(names: Mapping[str, Mapping[str, object]], known: str, table: str = "") -> Conversion:
    """Return the conversion of a list with one algorithm, given by its name or as a table with an id, to fields below `table`."""
    convert_name = read_objective(names, known, table)

    def convert_value(value: object, target: str) -> Iterator[Effect]:
        if isinstance(value, list) and len(value) == 1:
            yield from convert_name(value[0].get("id") if isinstance(value[0], dict) else value[0], target)
        elif value != []:
            yield Refuse(f"got {show_value(value)}; an environment has one algorithm here; known: {known}")

    return convert_value


def option_if(targets: Mapping[str, object]) -> Conversion:
    """Return the conversion of a switch that sets these fields if it is on."""

    def convert_value(value: object, target: str) -> Iterator[Effect]:
        if value is True:
            yield from (Set(path, setting) for path, setting in targets.items())
        elif value is not False and not is_nothing(value):
            yield Set(target, value)

    return convert_value


def put_below(name: str) -> Conversion:
    """Return the conversion that sets a value below a free-form field, under a dotted name."""

    def convert_value(value: object, target: str) -> Iterator[Effect]:
        yield Set(f"{target}.{name}", value)

    return convert_value


def seconds_left(value: object, target: str) -> Iterator[Effect]:
    """Set a deadline in seconds; none means the default."""
    if not is_nothing(value):
        yield Set(target, float(value) if is_number(value) and abs(value) < 1e15 else value)


def read_workers(value: object, target: str) -> Iterator[Effect]:
    """Set the number of an environment's processes; `auto` means the default."""
    if value == "auto":
        yield Note("ignored: one process runs all episodes concurrently; set a number to use more processes")
    elif not is_nothing(value):
        yield Set(target, value)


def gpu_ids(name: str) -> Conversion:
    """Return the conversion of GPU indices: a list, or a text with commas."""

    def convert_value(value: object, _target: str) -> Iterator[Effect]:
        if isinstance(value, str) and re.fullmatch(r"\d{1,4}(,\d{1,4})*", value):
            value = [int(part) for part in value.split(",")]
        if isinstance(value, int) and not isinstance(value, bool):
            value = [value]
        if isinstance(value, list) and value and all(is_count(index) or index == 0 for index in value):
            yield Later(name, value)
        else:
            yield Refuse(f"got {show_value(value)}, expected indices of GPUs, such as [0, 1]")

    return convert_value


def count_gpus(name: str) -> Conversion:
    """Return the conversion that keeps a number of GPUs or nodes as a hint for `complete`."""

    def convert_value(value: object, _target: str) -> Iterator[Effect]:
        if is_count(value) and value <= 65536:
            yield Later(name, value)
        elif not is_nothing(value):
            yield Refuse(f"got {show_value(value)}, expected a whole number from 1 to 65536")

    return convert_value
