"""What many runs cost on one control plane: `usage` (who used what), `fleet` (the runs and their orchestrators), `by_hand` (the units to
compare with), `table` (figures to Markdown)."""
