"""Rounds over an object store: who takes part is decided once, and so is what they did. docs/concepts/diloco.md

records     the small objects of a round, their bytes and where they lie
decide      the protocol: one pure function from what is seen to what is done
failures    what can go wrong, by name
patience    a store whose calls are counted and repeated
reading     a round as it lies in the store
identity    which run a place holds, and what its replicas agreed on
vectors     tensors as one vector in shards; the weighted mean
shards      the bytes of a round, out and in
running     one round: read, decide, act
claims      who holds a rank
states      what is saved, and a published state as bytes
heal        which state is published and loaded; applying commits without a round of one's own
comparing   whether weights are equal to the bit, now or later
membership  a replica's place in a run
options     what a manager is given, and what is refused
manager     what torchft's DiLoCo is given
progress    how a run is doing, for those who watch
"""
