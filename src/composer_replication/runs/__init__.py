"""The run directory: what each step of the pipeline leaves behind for the next, and how far it can be trusted."""

from composer_replication.runs.artefacts import ARTEFACTS, Artefact
from composer_replication.runs.directory import RunDir
from composer_replication.runs.journal import Journal, JournalContents, TornLine
from composer_replication.runs.lineage import Lineage
from composer_replication.runs.sidecar import ArtefactMeta, Source

__all__ = [
    "ARTEFACTS",
    "Artefact",
    "ArtefactMeta",
    "Journal",
    "JournalContents",
    "Lineage",
    "RunDir",
    "Source",
    "TornLine",
]
