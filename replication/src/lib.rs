//! How many copies: the replicated log of catalog commands, and the replicas of objects.
