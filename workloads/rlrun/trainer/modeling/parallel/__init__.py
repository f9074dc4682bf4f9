"""Division of a model over ranks: data (FSDP, HSDP), tensor, context, expert and pipeline parallelism, with the numbers of one rank.

Gradients follow one rule. Every rank of a tensor and context group computes the loss of a row, and it counts once; the backward of a
collective is its adjoint under this rule (`collectives`). Then the gradient of a divided parameter is complete at its rank. The gradient
of a shared parameter is complete on each rank (layers under tp), or a partial sum on each rank, which FSDP adds.
"""
