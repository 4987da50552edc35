"""A chat server for tests: a real one on loopback that fails on purpose, bills, and keeps its own ledger."""

from fault_server.chat import fingerprint, session_of
from fault_server.faults import BY_NAME, FAULTS, OK, Fault, draw, evenly, group
from fault_server.ledger import Billed, read_ledger
from fault_server.process import FaultServer
from fault_server.settings import DEFAULT_PRICES, Reply, Settings

__all__ = [
    "BY_NAME",
    "DEFAULT_PRICES",
    "FAULTS",
    "OK",
    "Billed",
    "Fault",
    "FaultServer",
    "Reply",
    "Settings",
    "draw",
    "evenly",
    "fingerprint",
    "group",
    "read_ledger",
    "session_of",
]
