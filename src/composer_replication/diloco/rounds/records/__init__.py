"""The records of a round, their bytes, and where they lie.

kinds    what a replica offers, which offers count, how the attempt ended
packing  a record as bytes and back, within bounds
layout   the keys of a run, and which names are the protocol's
"""

from composer_replication.diloco.rounds.records.kinds import (
    Manifest as Manifest,
)
from composer_replication.diloco.rounds.records.kinds import (
    Member as Member,
)
from composer_replication.diloco.rounds.records.kinds import (
    OfferId as OfferId,
)
from composer_replication.diloco.rounds.records.kinds import (
    OldRecord as OldRecord,
)
from composer_replication.diloco.rounds.records.kinds import (
    Outcome as Outcome,
)
from composer_replication.diloco.rounds.records.kinds import (
    RecordError as RecordError,
)
from composer_replication.diloco.rounds.records.kinds import (
    Result as Result,
)
from composer_replication.diloco.rounds.records.kinds import (
    Seal as Seal,
)
from composer_replication.diloco.rounds.records.kinds import (
    Shard as Shard,
)
from composer_replication.diloco.rounds.records.kinds import (
    digest as digest,
)
from composer_replication.diloco.rounds.records.kinds import (
    next_base as next_base,
)
from composer_replication.diloco.rounds.records.layout import (
    Layout as Layout,
)
from composer_replication.diloco.rounds.records.layout import (
    parse_mean as parse_mean,
)
from composer_replication.diloco.rounds.records.layout import (
    parse_offer as parse_offer,
)
from composer_replication.diloco.rounds.records.layout import (
    parse_outcome as parse_outcome,
)
from composer_replication.diloco.rounds.records.layout import (
    parse_state as parse_state,
)
from composer_replication.diloco.rounds.records.packing import (
    MOST_MAGNITUDE as MOST_MAGNITUDE,
)
from composer_replication.diloco.rounds.records.packing import (
    MOST_RANKS as MOST_RANKS,
)
from composer_replication.diloco.rounds.records.packing import (
    MOST_RECORD_BYTES as MOST_RECORD_BYTES,
)
from composer_replication.diloco.rounds.records.packing import (
    MOST_SHARDS as MOST_SHARDS,
)
from composer_replication.diloco.rounds.records.packing import (
    MOST_TRIALS as MOST_TRIALS,
)
from composer_replication.diloco.rounds.records.packing import (
    MOST_WEIGHT as MOST_WEIGHT,
)
from composer_replication.diloco.rounds.records.packing import (
    fields_of as fields_of,
)
from composer_replication.diloco.rounds.records.packing import (
    items as items,
)
from composer_replication.diloco.rounds.records.packing import (
    pack as pack,
)
from composer_replication.diloco.rounds.records.packing import (
    pack_manifest as pack_manifest,
)
from composer_replication.diloco.rounds.records.packing import (
    pack_outcome as pack_outcome,
)
from composer_replication.diloco.rounds.records.packing import (
    pack_seal as pack_seal,
)
from composer_replication.diloco.rounds.records.packing import (
    refusing as refusing,
)
from composer_replication.diloco.rounds.records.packing import (
    sha256_of as sha256_of,
)
from composer_replication.diloco.rounds.records.packing import (
    text as text,
)
from composer_replication.diloco.rounds.records.packing import (
    unpack as unpack,
)
from composer_replication.diloco.rounds.records.packing import (
    unpack_manifest as unpack_manifest,
)
from composer_replication.diloco.rounds.records.packing import (
    unpack_outcome as unpack_outcome,
)
from composer_replication.diloco.rounds.records.packing import (
    unpack_seal as unpack_seal,
)
from composer_replication.diloco.rounds.records.packing import (
    whole as whole,
)
