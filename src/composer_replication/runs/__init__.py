"""The run directory: what each step of the pipeline leaves behind for the next, and how far it can be trusted.

artefacts      which files there may be, and which command writes each
sidecar        what a file of records is, what it came from, and its checksum
source_paths   how a sidecar names a file outside of the run
records        JSONL beside its sidecar, written whole and checked before it is read
journal        JSONL that grows while a run goes on
lineage        what an artefact or trained weights were made from, whether that has changed, what channels did
directory      the run itself
conversations  the reader of conversations.jsonl
sites          the reader of sites.jsonl
conventions    conventions.md: rules that users named, which of them are kept
pairs          the reader of pairs.jsonl
tools          the reader of tools.jsonl: which tools a session is shown with
split          the reader of split.jsonl: which sessions are learnt from, and which are held out
evaluation     the reader of evaluation.json, and of the rows beside it
elsewhere      what was made from the run outside of it
"""

from composer_replication.runs.artefacts import (
    ARTEFACTS,
    Artefact,
    ArtefactMeta,
    Source,
)
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
