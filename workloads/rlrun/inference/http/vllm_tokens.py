"""vLLM's engine behind the route for packed tokens. It calls vLLM's engine client, not its HTTP handlers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlrun.inference.http.generate import GONE, GenerateError, Head, SampledTokens
from rlrun.protocol.messages.packed_columns import FLOATS, integer_column

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput


class VLLMTokens:
    """Adapter of vLLM's engine to `TokenEngine`.

    Args:
        engine: vLLM's engine client.
        served_model: name of the base model, used for requests without an adapter.
        adapters: adapters by name, from vLLM's registry.
    """

    def __init__(self, engine: EngineClient, *, served_model: str, adapters: Mapping[str, LoRARequest]) -> None:
        self._engine, self._served_model, self._adapters = engine, served_model, adapters

    async def sample_tokens(self, head: Head, prompt: array[int]) -> tuple[str, list[SampledTokens]]:
        """See `TokenEngine`."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.utils import random_uuid

        adapter = None
        if head.model is not None and head.model != self._served_model:
            adapter = self._adapters.get(head.model)
            if adapter is None:
                raise GenerateError(f"the model {head.model} does not exist", GONE)
        final = None
        try:
            # Flat log-probs: no Python object per token in this process.
            sampling = SamplingParams(
                **head.sampling_params.model_dump(exclude_none=True),
                logprobs=0,
                flat_logprobs=True,
                detokenize=bool(head.sampling_params.stop),  # stop strings can only be found in text
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            inputs = tokens_input(prompt.tolist(), cache_salt=head.cache_salt)
            request_id = f"rlrun-{head.request_id or random_uuid()}"
            async for output in self._engine.generate(inputs, sampling, request_id, lora_request=adapter):
                final = output
        except ValueError as error:  # vLLM raises ValueError for an invalid request, such as a prompt that is too long
            raise GenerateError(str(error), 400) from None
        if final is None:
            raise GenerateError("the engine ended the request without a result", 500)
        outputs = sorted(final.outputs, key=lambda output: output.index)
        with_routes = head.sampling_params.routed_experts_prompt_start is not None
        return head.model or self._served_model, [_of_vllm(output, with_routes=with_routes) for output in outputs]


def _of_vllm(output: CompletionOutput, *, with_routes: bool) -> SampledTokens:
    token_ids, logprobs = integer_column(list(output.token_ids)), array(FLOATS, output.logprobs.logprobs)
    if list(output.logprobs.token_ids) != token_ids.tolist():
        raise GenerateError("the engine's log-probs belong to other tokens than those sampled", 500)
    versions = [(span.version, span.start, span.end) for span in output.weight_versions or ()]
    if with_routes and output.routed_experts is None:
        raise GenerateError("the engine returns no experts; it was started without --enable-return-routed-experts", 400)
    routes = output.routed_experts if with_routes else None
    return SampledTokens(token_ids, logprobs, versions, output.finish_reason or "stop", routes)
