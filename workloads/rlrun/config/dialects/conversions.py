"""Values of another project as ours. Each conversion is total: what it does not understand is left for the field to refuse."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from rlrun.config.dialects.rows import Conversion, Effect, Extend, Later, Note, Refuse, Set
from rlrun.config.dialects.values import ALL_TASKS, is_count, is_nothing, is_number, show_value

TEMPLATE_ARGUMENT = "template argument "
"""Beginning of the hints that hold arguments of the chat template."""


def if_set(value: object, target: str) -> Iterator[Effect]:
    """The value; nothing for none, which is the default here."""
    if not is_nothing(value):
        yield Set(target, value)


def table_present(value: object, target: str) -> Iterator[Effect]:
    """An empty table of ours for theirs, whose keys have rows of their own; false is none, another value is the field's to refuse."""
    if not is_nothing(value):
        yield Set(target, {} if isinstance(value, Mapping) else None if value is False else value)


def samples_or_none(value: object, target: str) -> Iterator[Effect]:
    """A switch of what has a count here: off is none, on the default."""
    if value is not True:
        yield Set(target, 0 if value is False else value)


def all_tokens(value: object, target: str) -> Iterator[Effect]:
    """`top_k`, whose -1 is all tokens, as 0 is here."""
    if not is_nothing(value):
        yield Set(target, 0 if value == -1 and not isinstance(value, bool) else value)


def defer_value(name: str) -> Conversion:
    """Keep the value for `complete`."""

    def convert(value: object, _target: str) -> Iterator[Effect]:
        if not is_nothing(value):
            yield Later(name, value)

    return convert


def note_dropped(text: str) -> Conversion:
    """Without a field, and reported on standard error, because it may change what is sampled."""

    def convert(value: object, _target: str) -> Iterator[Effect]:
        if not is_nothing(value):
            yield Note(f"got {show_value(value)}: {text}")

    return convert


def map_choice(names: Mapping[str | bool, object], otherwise: str = "") -> Conversion:
    """Other names of the same choices. Without `otherwise`, an unknown one is left for the field to refuse."""

    def convert(value: object, target: str) -> Iterator[Effect]:
        if isinstance(value, str | bool) and value in names:
            yield Set(target, names[value])
        elif not is_nothing(value):
            yield Refuse(f"got {show_value(value)}; {otherwise}") if otherwise else Set(target, value)

    return convert


def only_values(allowed: Iterable[object], why: str, otherwise: str) -> Conversion:
    """Ignored for these values, which change nothing here; refused for all others."""
    known = tuple(allowed)

    def convert(value: object, _target: str) -> Iterator[Effect]:
        if any(value == one and type(value) is type(one) for one in known) or is_nothing(value):
            yield Note(f"ignored: {why}")
        else:
            yield Refuse(f"got {show_value(value)}; {otherwise}")

    return convert


def table_as(yes: object) -> Conversion:
    """A table or `true` means `yes`; `false` and none mean the default."""

    def convert(value: object, target: str) -> Iterator[Effect]:
        if isinstance(value, dict) or value is True:
            yield Set(target, yes)
        elif value is not False and not is_nothing(value):
            yield Set(target, value)

    return convert


def read_flag(value: object, target: str) -> Iterator[Effect]:
    """A table or `true` is true, none and `false` false."""
    yield Set(target, True if isinstance(value, dict) else False if is_nothing(value) else value)


def read_place(value: object, target: str) -> Iterator[Effect]:
    """A model or data set by name: a repository on the hub, or a folder as its form tells."""
    if isinstance(value, str) and (value.startswith((".", "/", "~")) or value.count("/") > 1):
        yield Set(f"{target.rpartition('.')[0]}.path", value.removeprefix("./"))
    else:
        yield Set(target, value)


def step_to_resume(value: object, target: str) -> Iterator[Effect]:
    """`resume_step`: -1 is the latest, a step that one."""
    if is_nothing(value):
        return
    if value == -1 and not isinstance(value, bool):
        yield Set(f"{target}.policy", "Latest")
    else:
        yield Set(f"{target}.policy", "Step")
        yield Set(f"{target}.step", value)
    yield Later("resume", True)


def run_name(value: object, target: str) -> Iterator[Effect]:
    """A name in the form that a run's has."""
    if isinstance(value, str):
        name = re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-")[:40].strip("-")
        yield Set(target, name if name[:1].isalpha() else f"run-{name}"[:40].strip("-"))
    elif not is_nothing(value):
        yield Set(target, value)


def read_harness(value: object, _target: str) -> Iterator[Effect]:
    """The program that plays an agent's part: the chat loop, or one in a sandbox, which is not played here."""
    name = value.get("id") if isinstance(value, dict) else value
    if is_nothing(name) or name in ("null", "default"):
        yield Note("ignored: the agent is the chat loop of the orchestrator")
    else:
        yield Refuse(
            f"got {show_value(name)}; there is none: the agent is the chat loop of the orchestrator, no program in a sandbox"
        )


def all_or(value: object, target: str) -> Iterator[Effect]:
    """A number of tasks; -1 is all."""
    if value == -1 and not isinstance(value, bool):
        yield Set(target, ALL_TASKS)
    elif not is_nothing(value):
        yield Set(target, value)


def targets_of_lora(value: object, target: str) -> Iterator[Effect]:
    """Names of modules; the usual set is the default, `experts` goes with it."""
    if isinstance(value, str):
        value = [value]
    usual = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        if set(value) - {"experts"} == usual:
            return
        if "experts" in value:
            yield Note("experts has no adapter of its own here: name the experts' layers, such as gate_proj")
            value = [name for name in value if name != "experts"]
    yield Set(target, value)


def environment_id(value: object, target: str) -> Iterator[Effect]:
    """An environment of verifiers, by the name that it is installed under: without owner and version."""
    if not isinstance(value, str) or ":" in value:
        yield Set(target, value)
        return
    name = value.partition("@")[0].rpartition("/")[2]
    yield Set(target, f"verifiers:{name}")


def environment_ids(value: object, target: str) -> Iterator[Effect]:
    """Environments by their ids alone: a list, or text with commas."""
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, list) and names and all(isinstance(name, str) and name.strip() for name in names):
        for i, name in enumerate(names):
            yield from environment_id(name.strip(), f"{target}[{i}].id")
    elif not is_nothing(value):
        yield Refuse(f"got {show_value(value)}, expected ids of environments with commas between them")


def policy_steps(value: object, target: str) -> Iterator[Effect]:
    """Steps of the policies to measure: a list, or text with commas."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}(,\d{1,9})*", value):
        value = [int(part) for part in value.split(",")]
    if is_count(value):
        value = [value]
    if not is_nothing(value):
        yield Set(target, value)
        yield Later("eval_steps", value)


def own_server(value: object, _target: str) -> Iterator[Effect]:
    """Address of an engine in training: engines are started here, or named by an option; a hosted API is none."""
    urls = value if isinstance(value, list) else [value]
    hosted = [url for url in urls if isinstance(url, str) and url.startswith("https://")]
    if hosted:
        yield Refuse(
            f"got {show_value(hosted[0])}; training needs token ids, log-probs and weights that can be changed, which other servers do not "
            "have: engines are started here, or named by the option --engine-url (eval and synthesize ask any server)"
        )
    else:
        yield Note("ignored: engines are started here, or named by the option --engine-url")


def of_chat(value: object, _target: str) -> Iterator[Effect]:
    """Kind of a server's API."""
    if isinstance(value, str) and value.startswith(("openai_chat", "vllm", "openai")) and value != "openai_completions":
        yield Note("ignored: requests are OpenAI's chat completions")
    else:
        yield Refuse(f"got {show_value(value)}; there is none: requests are OpenAI's chat completions")


def read_taskset(value: object, target: str) -> Iterator[Effect]:
    """A taskset of verifiers 0.4: its id, and the rest as its own configuration."""
    if not isinstance(value, dict):
        yield Refuse(f"got {show_value(value)}, expected a table with an id")
        return
    item = target.rpartition(".")[0]
    if "id" in value:
        yield from environment_id(value["id"], target)
    if rest := {name: one for name, one in value.items() if name != "id"}:
        yield Set(f"{item}.args.taskset", rest)


def loss_roles(value: object, target: str) -> Iterator[Effect]:
    """Roles whose messages are learned, from a switch for each."""
    if not isinstance(value, dict) or not all(isinstance(switch, bool) for switch in value.values()):
        yield Set(target, value)
    else:
        yield Set(target, [role for role, switch in ({"assistant": True} | value).items() if switch])


def read_transport(value: object, target: str) -> Iterator[Effect]:
    """`nccl` and `filesystem`."""
    names = {"nccl": "NCCL", "filesystem": "Filesystem"}
    if isinstance(value, str) and value not in names:
        yield Refuse(f"got {show_value(value)}; weights go by NCCL or Filesystem: write nccl or filesystem")
    else:
        yield Set(target, names[value] if isinstance(value, str) else value)


def server_flag(name: str) -> Conversion:
    """An argument of vLLM's server: `--name=value`, `--name`, or `--no-name`."""

    def convert(value: object, target: str) -> Iterator[Effect]:
        if isinstance(value, bool):
            yield Extend(target, [f"--{name}" if value else f"--no-{name}"])
        elif isinstance(value, str | int | float) and not is_nothing(value):
            yield Extend(target, [f"--{name}={value}"])
        elif not is_nothing(value):
            yield Refuse(f"got {show_value(value)}, expected one value, as on vLLM's command line")

    return convert


def tool_parser(value: object, target: str) -> Iterator[Effect]:
    """A parser of tool calls, which vLLM takes with a second flag; `auto` has no counterpart."""
    if value == "auto":
        yield Refuse("there is no auto here: name the parser of the model, such as hermes")
    elif isinstance(value, str) and not is_nothing(value):
        yield Extend(target, ["--enable-auto-tool-choice", f"--tool-call-parser={value}"])
    elif not is_nothing(value):
        yield Refuse(f"got {show_value(value)}, expected the name of a parser, such as hermes")


def read_filters(value: object, target: str) -> Iterator[Effect]:
    """A list of filters, each with its type; those that only measure are measured here anyway."""
    if not isinstance(value, list):
        yield Refuse(f"got {show_value(value)}, expected a list of tables")
        return
    for one in value:
        kind = one.get("type") if isinstance(one, dict) else None
        acts = isinstance(one, dict) and (one.get("enforce") is True or one.get("action") in ("drop", "mask"))
        if kind in ("zero_advantage", "zero_variance"):
            yield Set(f"{target}.zero_variance", acts)
        elif kind in ("gibberish", "repetition"):
            yield Set(f"{target}.{kind}_mask", acts)
            if kind == "repetition" and acts and "window" in one:
                yield Set(f"{target}.repetition_window", one["window"])
        else:
            yield Refuse(f"there is no filter {show_value(kind)} here; known: zero_advantage, gibberish, repetition")


def read_gates(value: object, target: str) -> Iterator[Effect]:
    """Named gates of a curriculum, each with its type; a group whose advantages are all 0 is replaced by another one."""
    if not isinstance(value, dict) or not all(isinstance(one, dict) for one in value.values()):
        yield Refuse(f"got {show_value(value)}, expected tables by name")
        return
    for name, one in value.items():
        bounds = (one.get("reject_min", 0), one.get("reject_max", 0))
        if one.get("type", "advantage_range") == "advantage_range" and bounds == (0, 0):
            yield Set(target, True)
        else:
            yield Refuse(
                f"gate {name}: there is none of that kind: algorithm.filters.zeroVariance leaves out groups of equal rewards"
            )


def refuse_custom(counterpart: str) -> Conversion:
    """A function of the user's own: its signature is another one here."""

    def convert(value: object, _target: str) -> Iterator[Effect]:
        yield Refuse(f"got {show_value(value)}; a function of your own takes other arguments here: {counterpart}")

    return convert


def loss_option(loss: str, option: str) -> Conversion:
    """An option of a loss, which names the loss too."""

    def convert(value: object, target: str) -> Iterator[Effect]:
        yield Set(f"{target}.name", loss)
        yield Set(f"{target}.options.{option}", value)

    return convert


def read_objective(names: Mapping[str, Mapping[str, object]], known: str, table: str = "") -> Conversion:
    """A named algorithm as fields of ours, below `table`; `known` lists what there is for the refusal of others."""

    def convert(value: object, _target: str) -> Iterator[Effect]:
        if isinstance(value, str) and value in names:
            yield from (Set(f"{table}.{path}" if table else path, one) for path, one in names[value].items())
        elif value == "sft":
            yield Refuse(
                "got 'sft'; rollouts are the policy's own: rlrun synthesize writes a teacher's, which sft learns from"
            )
        elif not is_nothing(value):
            yield Refuse(f"got {show_value(value)}; there is none here; known: {known}")

    return convert


def read_algorithms(names: Mapping[str, Mapping[str, object]], known: str, table: str = "") -> Conversion:
    """A list of one algorithm, by its name or as a table with an id; its fields are below `table`."""
    one = read_objective(names, known, table)

    def convert(value: object, target: str) -> Iterator[Effect]:
        if isinstance(value, list) and len(value) == 1:
            yield from one(value[0].get("id") if isinstance(value[0], dict) else value[0], target)
        elif value != []:
            yield Refuse(f"got {show_value(value)}; an environment has one algorithm here; known: {known}")

    return convert


def option_if(targets: Mapping[str, object]) -> Conversion:
    """A switch that sets these fields when it is on."""

    def convert(value: object, target: str) -> Iterator[Effect]:
        if value is True:
            yield from (Set(path, one) for path, one in targets.items())
        elif value is not False and not is_nothing(value):
            yield Set(target, value)

    return convert


def put_below(name: str) -> Conversion:
    """The value below a free-form field, under this dotted name."""

    def convert(value: object, target: str) -> Iterator[Effect]:
        yield Set(f"{target}.{name}", value)

    return convert


def seconds_left(value: object, target: str) -> Iterator[Effect]:
    """A deadline in seconds; none is the default."""
    if not is_nothing(value):
        yield Set(target, float(value) if is_number(value) and abs(value) < 1e15 else value)


def read_workers(value: object, target: str) -> Iterator[Effect]:
    """Processes of an environment; `auto` is left to the default."""
    if value == "auto":
        yield Note("ignored: one process plays all episodes side by side; set a number for more")
    elif not is_nothing(value):
        yield Set(target, value)


def gpu_ids(name: str) -> Conversion:
    """GPUs by index: a list, or text with commas."""

    def convert(value: object, _target: str) -> Iterator[Effect]:
        if isinstance(value, str) and re.fullmatch(r"\d{1,4}(,\d{1,4})*", value):
            value = [int(part) for part in value.split(",")]
        if isinstance(value, int) and not isinstance(value, bool):
            value = [value]
        if isinstance(value, list) and value and all(is_count(one) or one == 0 for one in value):
            yield Later(name, value)
        else:
            yield Refuse(f"got {show_value(value)}, expected indices of GPUs, such as [0, 1]")

    return convert


def count_gpus(name: str) -> Conversion:
    """A number of GPUs or nodes that others are made of."""

    def convert(value: object, _target: str) -> Iterator[Effect]:
        if is_count(value) and value <= 65536:
            yield Later(name, value)
        elif not is_nothing(value):
            yield Refuse(f"got {show_value(value)}, expected a whole number from 1 to 65536")

    return convert
