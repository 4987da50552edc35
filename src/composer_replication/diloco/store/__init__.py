"""Objects by key, in whatever place all replicas can reach.

objects  what a store promises, how it fails, and which keys there may be
memory   objects of one process
files    objects as files of a folder that the replicas share
denials  what is said where a store refuses us
retries  how long a request may take, and trying again until a deadline
buckets  objects in a bucket of S3, GCS or Azure
hub      objects in a repository of the Hub
opening  the store of a URI
"""

from composer_replication.diloco.store.files import MemoryStore
from composer_replication.diloco.store.objects import (
    MissingObject,
    ObjectStore,
    ObjectTooLarge,
    StoreCannotCreate,
    StoreClientMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from composer_replication.diloco.store.opening import open_store

__all__ = [
    "MemoryStore",
    "MissingObject",
    "ObjectStore",
    "ObjectTooLarge",
    "StoreCannotCreate",
    "StoreClientMissing",
    "StoreDenied",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "open_store",
]
