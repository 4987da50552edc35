"""Average vectors in rounds over an object store. The store ensures that each round has one list of members and one
result.

Read `round` first: it describes a round from a replica's offer to the commit. docs/concepts/diloco.md describes the
protocol.

round              one round: which replicas' offers count, and a replica that follows the rules
shards             the bytes of a round: vectors divided into shards, offers, the weighted mean
reading            reads rounds and other records from the store
records            the records of a round: fields, keys and bytes
settings           the settings of a run's rounds, and a replica's position in its run
patience           a store that counts its calls and repeats failing ones; the errors of rounds
claims             which process holds a rank, and which run is stored under a generation
replica_lifecycle  one replica between rounds: joining a run, catching up, advancing and leaving
states             the global state of a run: publishing it, and loading it into replicas that have fallen behind
comparing          whether the weights of replicas are bit-identical
manager            the manager for torchft's DiLoCo
progress           the progress of a run, for `crf diloco`
"""
