"""A prefix tree: which token ids the pages of live, parked and ended sequences hold. Its books are compiled."""
