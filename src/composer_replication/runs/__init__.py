"""The run directory: the files through which the steps of the pipeline exchange data, with checksums and sources.

artefacts     which files a run may contain, their sidecars, and JSONL that is checked before it is read
journal       JSONL that grows during a run
lineage       what an artefact or trained weights were made from, and whether that has changed
directory     `RunDir`: create, open, lock, read and write a run
files         conversations, tools, sites, pairs and evaluations
shared_reads  results of reading that the steps of `crf run` share
split         which sessions are trained on and which are held out
conventions   conventions.md: the rules that users stated when they refused a call
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
