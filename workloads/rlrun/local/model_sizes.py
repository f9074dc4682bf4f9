"""Findings from the sizes of a run's models, if they are known: impossible layouts, and too little memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rlrun.api.pod_placement import allocation_notes
from rlrun.api.resource import RLRunSpec
from rlrun.config.loading.yaml_text import Key
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.fit.architecture import Architecture
from rlrun.fit.gpu_kernels import absent_from_images
from rlrun.fit.layout import layout_problems
from rlrun.fit.memory_parts import MEMORY_MIB, memory_of, show_gib
from rlrun.fit.model_sources import UnknownModelError, shape_of
from rlrun.fit.report import Surroundings, gpu_products, needs_of
from rlrun.local.user_code import Finding


def size_findings(spec: RLRunSpec, wrong: Collection[Key]) -> Iterator[Finding]:
    """Yield findings about layout and memory. Models with unknown sizes are skipped.

    Args:
        spec: specification of the run.
        wrong: fields that already have a problem.
    """
    if any(key[0] == "model" for key in wrong) or (model := _layout_shape(spec.model)) is None:
        return
    config = spec.algorithm.reference
    reference = None if config is None else _layout_shape(config.resolve_model(spec.model))
    product = gpu_products(spec).get("trainer")
    found = layout_problems(spec, model, reference, product=product)
    problems = [Finding(key, message) for key, message in found]
    yield from problems
    if not problems and (config is None or reference is not None):
        yield from _memory_notices(spec, model, reference)


def allocation_notice(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield a notice with the layout that `spec.allocation` expands to."""
    if spec.allocation is None:
        return
    trainer, engines, parts = spec.trainer, spec.inference, []
    parallel = trainer.parallelism
    if trainer.gpus_per_replica:
        degrees = "".join(f", {name} {n}" for name in ("tp", "cp", "ep", "pp") if (n := getattr(parallel, name)) > 1)
        parts.append(f"trainer: {trainer.replicas} x {trainer.gpus_per_replica} GPUs{degrees}")
    if engines.gpus_per_replica:
        number = trainer.replicas if spec.placement.colocate else engines.replicas
        where = ", the trainer's in turn" if spec.placement.colocate else ""
        layout = f"tensorParallel {engines.tensor_parallel}, dataParallel {engines.data_parallel}"
        parts.append(f"inference: {number} x {engines.gpus_per_replica} GPUs{where} ({layout})")
    yield Finding(
        ("allocation",), "; ".join([f"is {', '.join(parts)}", *allocation_notes(spec.allocation)]), notice=True
    )


def kernel_notice(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield a notice about an attention kernel that RLRun's images lack. An image of the user's may contain it."""
    trained = spec.task in TRAINING_TASKS and spec.trainer.image is None
    if trained and (absent := absent_from_images(spec.trainer, _layout_shape(spec.model))) is not None:
        yield Finding(("trainer", "attention"), absent, notice=True)


def product_notices(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield notices about GPU products that are no label of a node, so the pods would wait, or whose memory is unknown."""
    placement = spec.placement
    asked: dict[Key, str | None] = {("placement", "gpu_product"): placement.gpu_product}
    asked |= {
        ("placement", role, "gpu_product"): getattr(placement, role).gpu_product for role in ("trainer", "inference")
    }
    for key, product in asked.items():
        if product is None:
            continue
        if product in MEMORY_MIB:
            yield Finding(
                key,
                f"({product}) must be the complete label value of the nodes, such as NVIDIA-H100-80GB-HBM3; "
                "`kubectl get nodes -L nvidia.com/gpu.product` prints the values",
                notice=True,
            )
        elif memory_of(product) is None:
            yield Finding(
                key,
                f"({product}) is a GPU of unknown memory, so the need of memory was not checked; "
                "`rlrun fit --gpu-memory SIZE FILE` checks it",
                notice=True,
            )


def autoscale_notice(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield a notice that the number of engines is constant on one machine."""
    block = spec.inference.autoscale
    if block is not None:
        words = f"applies only in a cluster; on one machine the run always has autoscale.min ({block.min}) engines"
        yield Finding(("inference", "autoscale"), words, notice=True)


def spot_notice(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield a notice that one machine has no interruptible nodes."""
    if spec.inference.spot is not None:
        yield Finding(
            ("inference", "spot"), "applies only in a cluster; on one machine all engines are equal", notice=True
        )


def elastic_notice(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield a notice about the sizes of an elastic trainer, which is constant on one machine."""
    trainer = spec.trainer
    if trainer.elastic is None:
        return
    found = trainer.sizes
    skipped = (
        f", not {', '.join(map(str, found.left_out))}: {next(iter(found.left_out.values()))}" if found.left_out else ""
    )
    words = (
        f"applies only in a cluster, where the trainer may have {', '.join(map(str, found.allowed))} pods{skipped}; on one machine it has "
        f"replicas ({trainer.replicas})"
    )
    yield Finding(("trainer", "elastic"), words, notice=True)


def _memory_notices(spec: RLRunSpec, model: Architecture, reference: Architecture | None) -> Iterator[Finding]:
    """Yield findings about memory. They are notices and not problems, because the sum is an estimate."""
    products = gpu_products(spec)
    known = {role: memory_of(product) for role, product in products.items() if product is not None}
    memory = {role: size for role, size in known.items() if size is not None}
    if len(memory) < len(products):
        return
    surroundings = Surroundings(model, reference, memory, products.get("trainer"), products.get("inference"))
    words = "each GPU needs about {} and has {}; `rlrun fit` reports what to change"
    needs = needs_of(spec, surroundings)
    for one in needs:
        if not one.fits:
            yield Finding(
                (one.role,), f"does not fit: {words.format(show_gib(one.total), show_gib(one.limit))}", notice=True
            )
    block = spec.trainer.elastic
    if block is None or not all(one.fits for one in needs):
        return
    smallest = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"replicas": block.min})})
    for one in needs_of(smallest, surroundings):
        if one.role == "trainer" and not one.fits:
            found = (
                f"does not fit with min ({block.min}) pods: {words.format(show_gib(one.total), show_gib(one.limit))}"
            )
            yield Finding(("trainer", "elastic"), found, notice=True)


def _layout_shape(model: ModelConfig) -> Architecture | None:
    try:
        return shape_of(model, "spec.model", count=False)
    except UnknownModelError:
        return None
