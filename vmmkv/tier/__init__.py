"""The host tier: tokens of suspended sequences and of evicted prefixes in host memory."""
