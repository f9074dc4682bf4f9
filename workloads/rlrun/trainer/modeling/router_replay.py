"""Routers of mixtures: replay of given routes, record of chosen ones, and the load of the experts.

Routers of transformers are modules that call `torch.topk` once on scores `[T, experts]` and weigh by its result. Inside of a router's
`forward` this call is answered with the row's routes; scores, bias, normalization and gradients stay the family's own, so that no list of
families is needed. The architecture check proves it for each model.

Replay of the engine's routes in each pass is R3 (arXiv:2510.11370), replay of the trainer's first pass in a step is R2 (arXiv:2507.18071).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlrun.protocol.files.routes import RouteShape, missing_route
from rlrun.trainer.modeling.router_balance import (
    Balance,
    PendingLoss,
    RouteCounts,
    RowBalance,
    remember_bias,
)

ROUTERS = ("Router", "Gate", "Gating")
"""Ends of the class names of routers; they have the attributes `top_k` and `num_experts`."""
_ROUTING, _ROW, _NUMBER = "_rlrun_routing", "_rlrun_routes", "_rlrun_route_number"
_TOPK = (torch.topk, torch.Tensor.topk)
_SIGMOID = (torch.sigmoid, torch.Tensor.sigmoid, nn.functional.sigmoid)
_NATIVE = -1
"""Expert number of a token without a route, in opened routes."""


class RouterError(Exception):
    """Error for a router whose choice cannot be replaced; the message has its class and the reason."""


class RowRoutes:
    """Routes of one row on this rank. Not a dataclass, because FSDP copies dataclasses for every layer.

    Args:
        given: routes to replay, `[T, L, K]` int32, or None. A token with `-1` is routed natively.
        real: tokens that count in the load, `[T]` bool. Default: all.
        counts: sums to which the first pass of each layer adds, or None.
        record: keep the chosen experts in `chosen`.
        balance: auxiliary loss of the row, or None.
    """

    def __init__(
        self,
        given: Tensor | None,
        *,
        real: Tensor | None = None,
        counts: RouteCounts | None = None,
        record: bool = False,
        balance: RowBalance | None = None,
    ) -> None:
        self.balance = balance
        self.given, self.real, self.counts = given, real, counts
        self.chosen: dict[int, Tensor] | None = {} if record else None
        self._seen: set[int] = set()

    def choose(self, layer: int, native: Tensor, pending: PendingLoss | None = None) -> Tensor:
        """Return the experts of a layer.

        Args:
            layer: number of the layer among layers with a router.
            native: choice of the router, `[T, K]` int64.
            pending: auxiliary loss that needs the choice.

        Raises:
            RouterError: the layer computes another number of tokens than the row.
        """
        chosen, missing = native, None
        if self.given is not None:
            given = self.given[:, layer]
            if given.shape != native.shape:
                raise RouterError(
                    f"a router chooses {tuple(native.shape)} experts, but the row has {tuple(given.shape)} routes"
                )
            missing = given[:, :1] == _NATIVE
            chosen = torch.where(missing, native, given.long())
        value = None if pending is None else pending.finish(layer, chosen)
        # A recomputation calls the layer again; it must not count its tokens twice.
        if layer not in self._seen:
            self._seen.add(layer)
            if self.chosen is not None:
                self.chosen[layer] = chosen.detach()
            if self.counts is not None:
                self.counts.add(layer, native, chosen, missing, self.real)
                if value is not None:
                    self.counts.aux_loss += value
        return chosen


class Routing:
    """Routes of the rows that a model computes.

    Args:
        shape: size of the model's routes.
    """

    def __init__(self, shape: RouteShape) -> None:
        self.shape = shape
        self.row: RowRoutes | None = None
        """Routes of the next row."""
        self.counts: RouteCounts | None = None
        """Sums of the current step; None until the first row with a gradient."""
        self.record = False
        """Whether rows record the chosen experts."""
        self.balance: Balance | None = None
        """Auxiliary loss of the next rows with a gradient, or None."""
        self.bias_fault: str | None = None
        """Reason why the correction biases cannot be updated, or None."""

    def start_row(
        self,
        given: Tensor | None,
        real: Tensor | None,
        device: torch.device,
        *,
        counted: bool = True,
        balance: Callable[[Balance, int], RowBalance] | None = None,
    ) -> None:
        """Set the routes of the next row. Only rows with a gradient count, because other passes compute the same tokens again.

        Args:
            given: see `RowRoutes`.
            real: see `RowRoutes`.
            device: device of the layers.
            counted: true if the row's tokens count, and have an auxiliary loss.
            balance: function that makes the auxiliary loss of the row for a number of layers with a router.
        """
        counted = counted and torch.is_grad_enabled()
        if counted and self.counts is None:
            self.counts = RouteCounts(self.shape, device)
        own = None
        if counted and self.balance is not None and balance is not None:
            own = balance(self.balance, self.shape.layers)
        self.row = RowRoutes(given, real=real, counts=self.counts if counted else None, record=self.record, balance=own)

    def chosen_routes(self) -> Tensor:
        """Return the recorded experts of all layers of the last row, `[T, L, K]` int32.

        Raises:
            RouterError: the row was not recorded, or a router was not called.
        """
        chosen = None if self.row is None else self.row.chosen
        if chosen is None or len(chosen) < self.shape.layers:
            raise RouterError(f"{len(chosen or ())} of {self.shape.layers} routers have chosen experts for a row")
        return torch.stack([chosen[layer] for layer in range(self.shape.layers)], dim=1).to(torch.int32)

    def take_counts(self, device: torch.device) -> RouteCounts:
        """Return the sums since the last call, on every rank, also if it has computed no row of samples."""
        counts, self.counts = self.counts, None
        return RouteCounts(self.shape, device) if counts is None else counts


class _CurrentRow:
    """Routes of the row that a decoder layer computes; None before the first row."""

    def __init__(self) -> None:
        self.routes: RowRoutes | None = None


def find_routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a decoder layer, or of a whole model."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith(ROUTERS)
        and isinstance(getattr(module, "top_k", None), int)
        and isinstance(getattr(module, "num_experts", None), int)
    ]


def route_shape(layers: Iterable[nn.Module]) -> RouteShape | None:
    """Return the size of the routes of decoder layers, or None for layers without routers.

    Raises:
        RouterError: a layer has several routers, or layers have different numbers of experts.
    """
    found: set[tuple[int, int]] = set()
    count = 0
    for layer in layers:
        routers: list[Any] = find_routers(layer)
        if len(routers) > 1:
            raise RouterError(f"a layer has {len(routers)} routers ({type(routers[0]).__name__}), expected one")
        found.update((router.num_experts, router.top_k) for router in routers)
        count += len(routers)
    if len(found) > 1:
        sizes = ", ".join(f"{top_k} of {experts}" for experts, top_k in sorted(found))
        raise RouterError(f"its layers choose different numbers of experts ({sizes})")
    if not found:
        return None
    ((experts, top_k),) = found
    return RouteShape(count, top_k, experts)


def set_routing(model: nn.Module, layers: Iterable[nn.Module]) -> Routing | None:
    """Number the routers of a whole model and store its `Routing`. Call it before layers are divided into stages.

    Returns:
        The stored object, or None for a model without routers.

    Raises:
        RouterError: see `route_shape`.
    """
    layers = list(layers)
    shape = route_shape(layers)
    if shape is None:
        return None
    routing = Routing(shape)
    pairs = [(layer, router) for layer in layers for router in find_routers(layer)]
    for number, (layer, router) in enumerate(pairs):
        router.__dict__[_NUMBER] = number
        routing.bias_fault = remember_bias(router, layer) or routing.bias_fault
    object.__setattr__(model, _ROUTING, routing)
    return routing


def routing_of(model: nn.Module) -> Routing | None:
    """Return the routing of a model, or None for a model without `set_routing`."""
    found: Routing | None = getattr(model, _ROUTING, None)
    return found


def numbered_routers(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """Return the routers of a model with `set_routing`, with their numbers; in a pipeline only those of this rank's stages."""
    return [(module.__dict__[_NUMBER], module) for module in model.modules() if _NUMBER in module.__dict__]


def freeze_routers(model: nn.Module, *, missing_in: Collection[str] = ()) -> None:
    """Freeze the parameters of all routers in place, before sharding.

    Args:
        model: whole model.
        missing_in: names of stored parameters; nothing is frozen if one of them belongs to a router.
    """
    routers = {id(parameter) for router in find_routers(model) for parameter in router.parameters()}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in routers}
    if names.isdisjoint(missing_in):
        for router in find_routers(model):
            router.requires_grad_(False)


def wrap_routers(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Make the routers of a model with `set_routing` choose the experts of the row's routes, in place.

    The layer's `forward` stores the row's routes for its own router. Call this before activation checkpointing, which recomputes the
    layer's `forward`: each recomputation then stores the routes of its own row, also if other rows have been computed in between.
    """
    routing = routing_of(model)
    if routing is None:
        return
    for layer in layers:
        for router in find_routers(layer):
            row = _CurrentRow()
            # The compiler does not trace function modes; mixtures have a graph break at their experts anyway.
            router.forward = torch.compiler.disable(partial(_route_tokens, router.forward, router, row))
            layer.forward = partial(_store_routes, layer.forward, row)


def pass_routes(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Pass the routes of a model's row to its layers with wrapped routers, in place.

    Call this after activation checkpointing, which keeps the arguments of a layer for its recomputation.
    """
    routing = routing_of(model)
    if routing is None:
        return
    for layer in layers:
        if find_routers(layer):
            layer.forward = partial(_pass_routes, layer.forward, routing)


def open_routes(routes: Tensor, device: torch.device) -> Tensor:
    """Copy raw routes `[T, L, K]` (uint8 or uint16) to a device as int32, with `-1` for missing ones."""
    missing = missing_route(str(routes.dtype).removeprefix("torch."))
    found = routes.to(device, non_blocking=True).to(torch.int32)
    return found.masked_fill((found == missing).all(-1, keepdim=True), _NATIVE)


def close_routes(routes: Tensor, shape: RouteShape) -> Tensor:
    """Return opened routes in the raw type of a model, with its number for missing ones."""
    kind = getattr(torch, shape.dtype.name)
    return routes.masked_fill(routes == _NATIVE, missing_route(shape.dtype)).to(kind)


def _pass_routes(forward: Any, routing: Routing, *inputs: object, **keywords: object) -> object:
    return forward(*inputs, **keywords, **{_ROW: routing.row})


def _store_routes(forward: Any, row: _CurrentRow, *inputs: object, **keywords: Any) -> object:
    row.routes = keywords.pop(_ROW)
    return forward(*inputs, **keywords)


def _route_tokens(forward: Any, router: Any, row: _CurrentRow, *inputs: object, **keywords: object) -> object:
    """Run a router's `forward` with the row's routes."""
    if row.routes is None:
        return forward(*inputs, **keywords)
    with _Choice(router, row.routes) as choice:
        result = forward(*inputs, **keywords)
    if choice.calls != 1:
        raise RouterError(f"{type(router).__name__} chooses its experts with {choice.calls} calls of topk, expected 1")
    return result


class _Choice(TorchFunctionMode):  # type: ignore[misc]  # torch is not type-checked
    """Answer of a router's `topk` with the row's routes, and auxiliary loss on its logits."""

    def __init__(self, router: Any, routes: RowRoutes) -> None:
        super().__init__()
        self._router, self._size = router, (router.num_experts, router.top_k)
        self._routes = routes
        balanced = routes.balance is not None and torch.is_grad_enabled()
        self._pending = PendingLoss(routes.balance) if balanced and routes.balance is not None else None
        self.calls = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function in _TOPK:
            return self._answer_topk(result, *args, **kwargs)
        pending = self._pending
        if pending is not None and isinstance(result, Tensor) and result.shape[1:] == self._size[:1]:
            if function is nn.functional.linear and pending.logits is None:
                return pending.keep_logits(result)
            pending.sigmoid |= function in _SIGMOID
        return result

    def _answer_topk(self, result: Any, input: Tensor, k: int, *_: object, **__: object) -> Any:
        # Group-limited routers first call topk for groups of experts, on other sizes.
        if input.ndim != 2 or (input.shape[1], k) != self._size:
            return result
        self.calls += 1
        if self._pending is not None and self._pending.logits is None:
            raise RouterError(
                f"trainer.router.auxLoss needs the logits of {type(self._router).__name__}, which are not the result of a linear layer; "
                "set trainer.router.auxLoss: 0"
            )
        indices = self._routes.choose(self._router.__dict__[_NUMBER], result.indices, self._pending)
        if indices is result.indices:
            return result
        return type(result)((input.gather(-1, indices), indices))
