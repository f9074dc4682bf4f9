"""Groups of rollouts: their states, and the rules that drop some of them."""
