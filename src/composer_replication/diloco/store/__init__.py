"""Object stores: objects by key, in a place that all replicas can reach.

objects  what a store promises, its errors and keys; repeating requests until a deadline
files    objects as files of a folder that the replicas share, and objects in memory
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
