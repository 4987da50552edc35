"""Object stores that all replicas can reach.

objects  the interface of a store, its errors and keys; repeating requests until a deadline
files    a store in a shared folder, and a store in memory
buckets  a store in a bucket of S3, GCS or Azure
hub      a store in a repository of the Hub
opening  opens the store at a URI
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
