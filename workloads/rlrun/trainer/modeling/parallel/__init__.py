"""Division of one model among ranks: data (FSDP, HSDP), tensors, context and experts, all with the numbers of one rank.

Gradients follow one rule. The loss of a row is computed by every rank of its tensor and context group alike and counts once; a
collective's backward is its adjoint under that rule (`collectives`). Then the gradient of a parameter that is divided over a group is
whole where it is, and that of one that ranks share is whole on each (layers under tp) or a part on each, which FSDP adds up.
"""
