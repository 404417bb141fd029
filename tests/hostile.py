"""Damage to files, and the judge of what a command makes of it: it works or refuses, and touches nothing else."""

import json
import pickle
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from permtriton.errors import PermTritonError

from . import zoo
from .sentences import SENTENCE, trained_tokenizer

MEMORY, SECONDS, WAIT = 3 * 2**30, 20, 200
CONFIG, WEIGHTS = "config.json", "model.safetensors"
ODD = [
    None, True, False, -1, 0, 1, 3, 2**31, 2**40, 10**12, 10**30, 1.5, -0.0, 1e308, float("nan"), float("inf"), "", "x",
    "\ud800", "\0", "../..", "/etc/passwd", "[/red]", "kernels-community/flash-attn", "PreTrainedModel", "AutoModel",
    "torch.float32", [], [[]], {}, {"a": {"b": []}}, ["x"] * 9, {"": 0}, {"type": "x"}, [None], "a" * 5000,
]  # fmt: skip
ODD_VALUES = st.sampled_from(ODD) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@contextmanager
def limited(memory: int = MEMORY) -> Iterator[None]:
    """Limits memory and time, so that allocating a size that a damaged file claims, or an endless loop, is an error."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + memory, before[1]))

    def too_long(*_arguments: object) -> None:
        raise KeyboardInterrupt("it hangs")  # not an Exception, so that no handler turns it into another error

    handlers = {number: signal.signal(number, too_long) for number in (signal.SIGALRM, signal.SIGPROF)}
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def judge(work: Callable[[], object], case: object) -> bool:
    """Runs ``work`` and returns whether it was refused; anything but our own error of one line fails the test."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of computing, however busy the machine is
    signal.alarm(WAIT)
    try:
        work()
    except PermTritonError:
        return True
    except BaseException as error:  # also the panics of Rust libraries and our alarm
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    return False


def explore(cases: st.SearchStrategy, check: Callable[..., object], count: int, soak: bool, more: int = 40) -> int:
    """Runs ``check`` on ``count`` cases, always the same; in a soak on ``more`` times as many, drawn anew."""
    done = 0

    @settings(
        max_examples=count * more if soak else count,
        derandomize=not soak,
        database=None,
        deadline=None,
        print_blob=soak,
        phases=(Phase.explicit, Phase.generate),  # a case is small as it is
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def run(case: object) -> None:
        nonlocal done
        done += 1
        check(case)

    run()
    return done


# -- a folder full of traps ----------------------------------------------------------------------------------------


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


@dataclass(frozen=True)
class Trap:
    """A model folder whose code and pickles leave a mark when they run, and the tree around it.

    Attributes:
        root: everything that a command could reach by relative paths.
        pristine: the model; its copies are damaged.
        mark: file that exists once code from the folder has run.
    """

    root: Path
    pristine: Path
    mark: Path

    @property
    def text(self) -> Path:
        return self.root / "text.txt"

    def damaged(self, damage: Callable[[Path], object]) -> Path:
        """Returns a damaged copy, always at the same place."""
        folder = self.root / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.pristine, folder)
        damage(folder)
        return folder

    def files(self) -> dict[str, bytes | None]:
        """Returns the content of every file."""
        found = sorted(self.root.rglob("*"))
        return {str(path.relative_to(self.root)): path.read_bytes() if path.is_file() else None for path in found}

    def judge(self, work: Callable[[], object], case: object) -> bool:
        """Does what `judge` does, and checks that nothing was written and no code of the folder ran."""
        before = self.files()
        refused = judge(work, case)
        assert self.files() == before, f"{case}: files changed"
        assert not self.mark.exists(), f"{case}: code from the folder ran"
        return refused


def set_trap(root: Path) -> Trap:
    """Makes a tiny model with code and pickles that must not run."""
    folder, mark = root / "pristine", root.parent / f"{root.name} the code ran"
    root.mkdir()
    tokenizer = trained_tokenizer()
    tokenizer.chat_template = {"default": "x", "tools": "y"}
    tokenizer.save_pretrained(folder)
    zoo.tiny_llama(vocab_size=len(tokenizer), tie_word_embeddings=True).save_pretrained(folder)
    for name in ("modeling", "tokenization", "configuration"):
        code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\nfrom transformers import *\n"
        (folder / f"{name}_evil.py").write_text(code)
    for name in ("pytorch_model.bin", "training_args.bin", "adapter_model.bin", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(Touch(mark)))
    auto = {"AutoConfig": "configuration_evil.LlamaConfig", "AutoModelForCausalLM": "modeling_evil.LlamaForCausalLM"}
    edit(folder / CONFIG, lambda found: found.update(auto_map=auto))
    slow = "tokenization_evil.PreTrainedTokenizerFast"
    edit(folder / "tokenizer_config.json", lambda found: found.update(auto_map={"AutoTokenizer": [None, slow]}))
    (root / "text.txt").write_text(SENTENCE * 60, encoding="utf-8")
    return Trap(root, folder, mark)


# -- damage --------------------------------------------------------------------------------------------------------


def edit(path: Path, change: Callable[[dict], object]) -> None:
    """Rewrites a JSON file after ``change`` has edited its content in place."""
    found = json.loads(path.read_text(encoding="utf-8"))
    change(found)
    path.write_text(json.dumps(found), encoding="utf-8")


def places(value: object, before: tuple = ()) -> Iterator[tuple]:
    """Yields the path of every entry inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*before, key)
        yield from places(inner, (*before, key))


def put(found: dict, place: tuple, value: object, remove: bool = False) -> None:
    """Replaces or removes the entry at a path inside a JSON value."""
    holder = found
    for key in place[:-1]:
        holder = holder[key]
    if remove:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value


@st.composite
def json_edits(draw: st.DrawFn, content: dict, more: tuple[str, ...] = ()) -> tuple[tuple, object, bool]:
    """Draws an entry of a JSON object, or one of ``more`` keys of the top, and what becomes of it."""
    shallow = [place for place in places(content) if len(place) < 5][:400]
    place = draw(st.sampled_from([*shallow, *((key,) for key in more)]))
    remove = place[0] not in more and draw(st.integers(0, 9)) < 2
    return place, None if remove else draw(ODD_VALUES), remove


@st.composite
def byte_edits(draw: st.DrawFn) -> tuple[str, float, bytes]:
    """Draws how the bytes of a file change, where (as a fraction of its length), and with which bytes."""
    kind = draw(st.sampled_from(["flip", "flip", "cut", "insert", "repeat", "replace"]))
    return kind, draw(st.floats(0, 1, exclude_max=True)), draw(st.binary(min_size=1, max_size=6))


def change_bytes(content: bytes, edit: tuple[str, float, bytes]) -> bytes:
    """Applies what `byte_edits` drew."""
    kind, where, data = edit
    at = int(where * len(content))
    changed = {
        "flip": bytes(a ^ (1 << data[0] % 8) for a in content[at : at + 1]),
        "cut": b"",
        "insert": data + content[at : at + 1],
        "repeat": content[at : at + 64] * 2,
        "replace": data,
    }[kind]
    return content[:at] + changed + (b"" if kind == "cut" else content[at + 1 :])
