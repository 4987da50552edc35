"""Rounds of averaging over an object store: the store decides once who takes part, and once how the round ends.

docs/concepts/diloco.md describes the protocol.

records     the records of a round: fields, keys and bytes
decide      the protocol: one pure function from what a replica sees to what it does next
patience    a store whose calls are counted and repeated; the errors of rounds
reading     a round and other records, read from the store
vectors     tensors as one vector in shards; the weighted mean
running     one round: read, decide, act; the bytes of its shards
claims      which process holds a rank, and which run a place holds
published   a published state as bytes
heal        publishing and loading states; applying commits without taking part in their rounds
comparing   whether weights are equal to the bit
membership  joining a run, catching up, advancing and leaving
manager     the manager for torchft's DiLoCo
progress    how a run is doing, for `crf diloco`
"""
