"""What was compiled and tuned, kept between calls whose machine is a new one each time: one archive in the results.

The caches are unpacked to a folder whose path is always the same, because Triton's entries hold absolute paths.
"""

import shutil
import tarfile
import tempfile
from pathlib import Path

from benchmarks.gpu.table import ROWS

ARCHIVE, WINNERS = "caches.tar.gz", "autotune.json"
TUNED = ("tune", *(name for name in ROWS if name.endswith("_tuned")), "counters")
UNUSED = (".ttir", ".ttgir", ".llir", ".ptx", ".source", ".lock")


def work() -> Path:
    """Returns the folder of all caches."""
    return Path(tempfile.gettempdir()) / "permtriton-gpu-caches"


def environment(row: str) -> dict[str, str]:
    """Returns the variables of a row's process: where caches are, with the winners of tuning for rows that use them."""
    folder = work()
    return {
        "XDG_CACHE_HOME": str(folder / ("tuned" if row in TUNED else "default")),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
    }  # fmt: skip


def unpack(results: Path) -> None:
    """Adds what the archive holds to the caches; winners that lie beside it are used."""
    work().mkdir(parents=True, exist_ok=True)
    if (results / ARCHIVE).is_file():
        with tarfile.open(results / ARCHIVE) as archive:
            archive.extractall(work(), filter="data")
    if (results / WINNERS).is_file():
        there = work() / "tuned" / "permtriton" / WINNERS
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(results / WINNERS, there)


def pack(results: Path) -> None:
    """Replaces the archive; intermediate code, which Triton does not read again, is left out."""
    temporary = results / f"{ARCHIVE}.tmp"
    with tarfile.open(temporary, "w:gz", compresslevel=3) as archive:
        for file in sorted(work().rglob("*")):
            if file.is_file() and not file.name.endswith(UNUSED):
                archive.add(file, file.relative_to(work()))
    temporary.replace(results / ARCHIVE)
    winners = work() / "tuned" / "permtriton" / WINNERS
    if winners.is_file():
        shutil.copyfile(winners, results / WINNERS)
