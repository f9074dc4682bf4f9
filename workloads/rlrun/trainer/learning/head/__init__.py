"""Fused LM head: kernels for a chunk of logits (`eager`, `triton_kernels`), and the loop over chunks (`fused`)."""
