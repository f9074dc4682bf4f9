"""Fused LM head: kernels for a chunk of logits (`triton_kernels`, and in plain torch), and the loop over chunks (`fused`)."""
