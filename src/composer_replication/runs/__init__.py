"""The run directory: the files that each step of the pipeline writes for the next one, with checksums and sources.

artefacts    which files a run may hold, their sidecars, and JSONL that is checked before it is read
journal      JSONL that grows during a run
lineage      what an artefact or trained weights were made from, and whether that has changed
directory    `RunDir`: creating, opening, locking, reading and writing a run
files        readers and writers of conversations, tools, sites, pairs and evaluations
split        which sessions are trained on and which are held out
conventions  conventions.md: the rules that users stated when they refused a call
"""

from composer_replication.runs.artefacts import ARTEFACTS, Artefact, ArtefactMeta, Source
from composer_replication.runs.directory import RunDir
from composer_replication.runs.journal import Journal, JournalContents, TornLine
from composer_replication.runs.lineage import Lineage

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
