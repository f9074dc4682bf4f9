"""The fused LM head: what is done with a chunk of logits (`eager`, `triton_kernels`), and the loop over chunks (`fused`)."""
