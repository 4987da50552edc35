"""What went wrong outside of this program, in a sentence that says what to do: disks, stores, memory, files."""

from __future__ import annotations

import errno
import sys

_WHAT_TO_DO = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room there: a quota is used up",
    errno.EFBIG: "that file may not grow any more: look at the limits of the file system and of `ulimit -f`",
    errno.EROFS: "that place is read-only: name another one",
    errno.EACCES: "look at whose the file or folder is",
    errno.EPERM: "look at whose the file or folder is",
    errno.EMFILE: "too many files are open: raise `ulimit -n`",
    errno.EIO: "the disk or the network drive fails",
}
_AGAIN = "No artefact was left half written, and the same command can be run again."
_UNFORESEEN = (
    "This was not foreseen: please report it, with what CRF_DEBUG=1 in front of the same command prints. "
    "No artefact was left half written."
)


def in_words(error: Exception) -> str:
    """One line about an error that is nobody's on purpose."""
    lines = str(error).strip().splitlines()
    first = lines[0].rstrip(".") if lines else ""
    if isinstance(error, OSError):
        advice = _WHAT_TO_DO.get(error.errno or 0)
        return f"{first or type(error).__name__}. {_capital(advice)}. {_AGAIN}" if advice else str(error)
    if isinstance(error, MemoryError):
        return f"there is not enough memory{': ' + first if first else ''}. {_AGAIN}"
    if _is_of(error, "sqlite3", "Error"):
        return f"teacher_cache.sqlite: {first}. {_about_store(first)}"
    if _is_of(error, "safetensors", "SafetensorError"):
        return f"a safetensors file that cannot be read: {first}. Get it again, or take another checkpoint. {_AGAIN}"
    return f"{type(error).__name__}{': ' + first if first else ''}. {_UNFORESEEN}"


def _about_store(said: str) -> str:
    if "full" in said or "readonly" in said or "unable to open" in said or "disk I/O" in said:
        return f"The store of paid answers cannot be written: make room, or look at whose the file is. {_AGAIN}"
    if "locked" in said or "busy" in said:
        return "Another process has held the store of paid answers for too long: wait until it is done."
    return (
        "The store of paid answers is damaged: move the file away, or put a copy from before in its place. Without it "
        "what was answered is asked again, and the cap begins anew."
    )


def _is_of(error: Exception, module: str, name: str) -> bool:
    """Whether an error is of a library's class; one that was never loaded has raised nothing."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(error, kind)


def _capital(text: str | None) -> str:
    return text[:1].upper() + text[1:] if text else ""
