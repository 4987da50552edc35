"""Rounds of averaging over an object store: the store decides once who takes part, and once how the round ends.

Read `round` first: it tells one round from a replica's offer to the commit. docs/concepts/diloco.md describes the
protocol.

round       one round: the rules, and a replica that follows them
shards      the bytes of a round: a vector in shards, offers, the weighted mean
reading     a round and other records, read from the store
records     the records of a round: fields, keys and bytes
settings    the settings of a run's rounds, and where a replica is in its run
patience    a store whose calls are counted and repeated; the errors of rounds
claims      which process holds a rank, and which run a place in the store holds
membership  joining a run, catching up, advancing and leaving
states      the global state of a run: publishing it, and loading it into replicas that have fallen behind
comparing   whether the weights of replicas are equal to the bit
manager     the manager for torchft's DiLoCo
progress    how a run is doing, for `crf diloco`
"""
