"""Compilation that nobody has asked for: what torch's compiler fails at is computed as it is written.

A forward pass that cannot be compiled is left to Python by torch's tracer. A backward pass is compiled when the first gradient is pulled
back, beyond the tracer: there the traced operations are executed one by one. Each rank does so on its own, as they are the same operations,
with no collective among them: nothing has been accumulated or sent, no rank waits for another, and no pass is computed again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.fx import GraphModule

_said: set[str] = set()


def compile_layer(layer: nn.Module, *, asked: bool) -> None:
    """Compile a layer's forward pass, and with it the backward pass, in place; both when they are first needed.

    Args:
        layer: of the model.
        asked: whether the run asks for it: an error of the compiler then ends the run.
    """
    options: dict[str, Any] = {} if asked else {"backend": _compile_backend}
    import torch._dynamo.config as tracer  # takes seconds

    # An epsilon or a scale is the same for all rows. As an input it would be a number on the CPU that kernels read in float64, and inside
    # of a checkpoint a kernel of its own there, for which the compiler first tries a dozen C++ programs.
    tracer.specialize_float = True
    if not asked:
        tracer.suppress_errors = True
    layer.forward = torch.compile(layer.forward, dynamic=True, **options)


def _compile_backend(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    found: Callable[..., Any] = compile_fx(graph, inputs, inner_compile=_compile_pass)
    return found


def _compile_pass(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Compiled operations of one pass; of a backward pass that cannot be compiled, the operations themselves."""
    if not options.get("is_backward"):
        return compile_operations(graph, inputs, **options)
    kept = copy.deepcopy(graph)  # the compiler changes what it is given
    try:
        return compile_operations(graph, inputs, **options)
    except Exception as error:  # of the compiler, whatever it is
        _warn_once(error)
        from functorch.compile import make_boxed_func  # type: ignore[import-untyped]

        return make_boxed_func(kept.forward)


def compile_operations(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """torch's compiler, on the operations of one pass."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(graph, inputs, **options)


def _warn_once(error: Exception) -> None:
    lines = str(error).strip().splitlines() or ["no message"]
    text = f"{type(error).__name__}: {lines[0]}"
    if text in _said:  # every kind of layer has the same one
        return
    _said.add(text)
    logger.warning(
        f"torch cannot compile the backward pass of a layer ({text}); its operations are computed one by one, with the same result, but "
        "slower. Set trainer.compile: false to compile nothing, or true to end the run at such an error"
    )
