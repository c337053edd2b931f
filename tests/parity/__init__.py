"""Every causal and sequence-to-sequence model of transformers, small and random, with vmmkv against without."""
