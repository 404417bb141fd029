"""Damaged checkpoints give our own error or the intact model, quickly and in little memory."""

import json
import random
import re
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from permtriton.checkpoint.export import export
from permtriton.errors import ModelError, PermTritonError
from permtriton.model.load import load_model
from permtriton.model.source import Source

from . import folders
from .hostile import MEMORY, SECONDS, limited, places, put

SMALL = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 40, "head_dim": 8}
WEIGHTS, CONFIG, REPORT = "model.safetensors", "config.json", "permtriton.json"
KINDS = ("portable packed", "fused packed", "fused dense")
Damage = Callable[[Path, random.Random], None]


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> dict[str, Path]:
    """A folder of each kind, with hashes."""
    root, made = tmp_path_factory.mktemp("fuzz"), {}
    for kind in KINDS:
        layout, format = kind.split()
        saved = root / layout
        if not saved.exists():
            folders.save(folders.model_of("llama", fused=layout == "fused", dtype=torch.bfloat16, **SMALL), saved)
        made[kind] = root / kind.replace(" ", "-")
        export(saved, made[kind], format)
    return made


@pytest.fixture(scope="module", autouse=True)
def _limits() -> Iterator[None]:
    with limited():
        yield


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def by_loading(folder: Path) -> dict[str, Tensor]:
    return folders.state(load_model(Source(str(folder), device="cpu")))


def by_transformers(folder: Path) -> dict[str, Tensor]:
    return folders.state(AutoModelForCausalLM.from_pretrained(folder))


def by_exporting(folder: Path) -> dict[str, Tensor]:
    """Exports and loads; only loading can judge what is not part of the pruning, such as an embedding's name."""
    output = folder.with_name("exported")
    shutil.rmtree(output, ignore_errors=True)
    export(folder, output, "dense")
    try:
        return by_loading(output)
    except Exception as error:
        raise ModelError(f"{type(error).__name__} on loading what was exported") from error


WAYS = {"load_model": by_loading, "from_pretrained": by_transformers, "export": by_exporting}
_EXPECTED: dict[tuple[Path, str], dict[str, Tensor]] = {}


def check(folder: Path, original: Path, way: str, what: str) -> bool:
    """Loads and judges; returns whether it was refused. transformers may meet the damage before permtriton does."""
    if (original, way) not in _EXPECTED:
        _EXPECTED[original, way] = WAYS[way](shutil.copytree(original, folder.with_name("intact"), dirs_exist_ok=True))
    before, caught, found = peak(), None, {}
    signal.alarm(SECONDS)
    try:
        found = WAYS[way](folder)
    except Exception as error:
        caught = error
    finally:
        signal.alarm(0)
    assert peak() - before < MEMORY / 4, what
    if caught is None:
        assert folders.differing(_EXPECTED[original, way], found) == [], f"{what}: another model came out"
        return False
    allowed = Exception if way == "from_pretrained" else PermTritonError
    assert isinstance(caught, allowed), f"{what}: {type(caught).__name__}: {caught}"
    assert not isinstance(caught, PermTritonError) or len(str(caught).splitlines()) == 1, f"{what}: {caught}"
    return True


def without_hashes(folder: Path) -> None:
    folders.edit_json(folder / CONFIG, lambda config: config["quantization_config"].pop("sha256"))
    folders.edit_json(folder / REPORT, lambda report: report.pop("files"))


def run(
    intact: dict[str, Path], kind: str, place: Path, cases: dict[str, Damage], ways=tuple(WAYS), hashes=False
) -> int:
    """Damages a copy in each way and loads it in each; returns how often it was refused."""
    refused, folder = 0, place / "damaged"
    for what, damage in cases.items():
        for way in ways:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(intact[kind], folder)
            if not hashes:
                without_hashes(folder)
            damage(folder, random.Random(what))
            refused += check(folder, intact[kind], way, f"{kind}, {way}, {what}")
    return refused


def some(cases: dict[str, Damage], soak: bool) -> dict[str, Damage]:
    """All cases with ``--soak``; else, of those that differ in a running number only, every third one."""
    numbers = {name: re.fullmatch(r".* (\d\d?)", name) for name in cases}
    return {name: cases[name] for name, number in numbers.items() if soak or not number or int(number[1]) % 3 == 0}


# -- bytes ---------------------------------------------------------------------------------------------------------


def edit_bytes(change: Callable[[bytearray, int, random.Random], bytes | bytearray]) -> Damage:
    """Changes the bytes of the weights; ``change`` receives the position where the header ends."""

    def apply(folder: Path, rng: random.Random) -> None:
        content = bytearray((folder / WEIGHTS).read_bytes())
        end = 8 + struct.unpack("<Q", content[:8])[0]
        (folder / WEIGHTS).write_bytes(bytes(change(content, end, rng)))

    return apply


def flip(content: bytearray, position: int, rng: random.Random) -> bytearray:
    content[position] ^= 1 << rng.randrange(8)
    return content


def header_length(value: int) -> Damage:
    return edit_bytes(lambda content, end, rng: struct.pack("<Q", value) + content[8:])


BYTES: dict[str, Damage] = {
    **{f"cut in the header {n}": edit_bytes(lambda c, e, r: c[: r.randrange(e)]) for n in range(3)},
    **{f"cut in the data {n}": edit_bytes(lambda c, e, r: c[: r.randrange(e, len(c))]) for n in range(3)},
    **{f"flipped in the header {n}": edit_bytes(lambda c, e, r: flip(c, r.randrange(8, e), r)) for n in range(30)},
    **{f"flipped in the length {n}": edit_bytes(lambda c, e, r: flip(c, r.randrange(8), r)) for n in range(4)},
    **{f"header of {n}": header_length(n) for n in (0, 1, 2**31, 2**40, 2**63, 2**64 - 1)},
    "empty": edit_bytes(lambda c, e, r: b""),
    "longer": edit_bytes(lambda c, e, r: c + b"\0" * 64),
    "zeros": edit_bytes(lambda c, e, r: b"\0" * len(c)),
    "noise": edit_bytes(lambda c, e, r: r.randbytes(len(c))),
    "deep header": edit_bytes(lambda c, e, r: struct.pack("<Q", 10**5) + b"[" * 10**5 + c[e:]),
}


@pytest.mark.slow
def test_damaged_bytes(intact, tmp_path, soak):
    cases = some(BYTES, soak)
    assert run(intact, "portable packed", tmp_path, cases, ways=("load_model", "export")) > 1.6 * len(cases)


DATA: dict[str, Damage] = {
    f"flipped in the data {n}": edit_bytes(lambda c, e, r: flip(c, r.randrange(e, len(c)), r)) for n in range(12)
}


@pytest.mark.slow
def test_a_flipped_value_is_found_by_its_hash(intact, tmp_path, soak):
    cases = some(DATA, soak)
    assert run(intact, "fused packed", tmp_path, cases, hashes=True) == len(cases) * len(WAYS), "all of them"


# -- headers that claim what is not there --------------------------------------------------------------------------


def edit_header(change: Callable[[dict, str, random.Random], None], *, fit: bool = False) -> Damage:
    """Changes the entry of a tensor drawn at random; ``fit`` makes the file as long as its offsets claim, sparsely."""

    def apply(folder: Path, rng: random.Random) -> None:
        content = (folder / WEIGHTS).read_bytes()
        end = 8 + struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8:end])
        name = rng.choice(sorted(set(header) - {"__metadata__"}))
        change(header, name, rng)
        text = json.dumps(header).encode()
        with (folder / WEIGHTS).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text + content[end:])
            if fit:
                file.truncate(
                    8 + len(text) + max(entry["data_offsets"][1] for entry in header.values() if "dtype" in entry)
                )

    return apply


def drop(found: dict, name: str, rng: random.Random) -> None:
    del found[name]


def huge(header: dict, name: str, rng: random.Random) -> None:
    """A last tensor of 64 GB, in a file with a hole of that size."""
    last = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][1])
    start, size = header[last]["data_offsets"][0], 2**36
    width = {"BF16": 2, "U8": 1}[header[last]["dtype"]]
    header[last].update(shape=[size // width], data_offsets=[start, start + size])


DTYPES = ["F32", "I8", "F64", "X", 3, None]
HEADERS: dict[str, Damage] = {
    **{f"turned shape {n}": edit_header(lambda h, t, r: h[t]["shape"].reverse()) for n in range(8)},
    **{
        f"flat shape {n}": edit_header(lambda h, t, r: h[t].update(shape=[torch.Size(h[t]["shape"]).numel()]))
        for n in range(4)
    },
    **{
        f"huge shape {n}": edit_header(lambda h, t, r: h[t].update(shape=[2 ** r.choice([31, 40, 62])] * 2))
        for n in range(4)
    },
    **{f"negative shape {n}": edit_header(lambda h, t, r: h[t].update(shape=[-1])) for n in range(2)},
    **{f"dtype {n}": edit_header(lambda h, t, r: h[t].update(dtype=r.choice(DTYPES))) for n in range(8)},
    **{
        f"offsets {n}": edit_header(lambda h, t, r: h[t].update(data_offsets=[r.randrange(99), 2**60]))
        for n in range(3)
    },
    **{f"no tensor {n}": edit_header(drop) for n in range(4)},
    "a hole of 64 GB": edit_header(huge, fit=True),
}


@pytest.mark.slow
def test_damaged_headers(intact, tmp_path):
    run(intact, "portable packed", tmp_path, HEADERS)


# -- tensors -------------------------------------------------------------------------------------------------------


def edit_tensors(suffix: str, change: Callable[[dict[str, Tensor], str, random.Random], None]) -> Damage:
    def apply(folder: Path, rng: random.Random) -> None:
        tensors = load_file(folder / WEIGHTS)
        if names := sorted(name for name in tensors if name.endswith(suffix)):
            change(tensors, rng.choice(names), rng)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return apply


def swap(tensors: dict[str, Tensor], name: str, rng: random.Random) -> None:
    other = rng.choice(sorted(n for n in tensors if tensors[n].shape != tensors[name].shape))
    tensors[name], tensors[other] = tensors[other], tensors[name]


def tamper(value: int) -> Callable[[dict[str, Tensor], str, random.Random], None]:
    def apply(tensors: dict[str, Tensor], name: str, rng: random.Random) -> None:
        tensors[name].view(-1)[rng.randrange(tensors[name].numel())] = value

    return apply


TENSORS: dict[str, Damage] = {
    **{f"missing {n}": edit_tensors("", drop) for n in range(6)},
    **{f"swapped {n}": edit_tensors("", swap) for n in range(4)},
    **{
        f"another dtype {n}": edit_tensors("_values", lambda t, x, r: t.update({x: t[x].to(torch.int16)}))
        for n in range(2)
    },
    **{f"equal positions {value}": edit_tensors("_positions", tamper(value)) for value in (0, 0x55, 0xFF)},
    **{f"no permutation {value}": edit_tensors(".index", tamper(value)) for value in (255, 254)},
    "no index": edit_tensors(".index", drop),
    "wider index": edit_tensors(".index", lambda t, x, r: t.update({x: t[x].int()})),
    "longer index": edit_tensors(".index", lambda t, x, r: t.update({x: torch.arange(99, dtype=torch.uint8)})),
    "one more": edit_tensors("", lambda t, x, r: t.update(more=torch.ones(3))),
    "one more of ours": edit_tensors("", lambda t, x, r: t.update({"model.norm.index": torch.ones(3)})),
    "not finite": edit_tensors("_values", tamper(float("inf"))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_damaged_tensors(intact, tmp_path, kind, soak):
    run(intact, kind, tmp_path, some(TENSORS, soak))


# -- JSON ----------------------------------------------------------------------------------------------------------

ODD = [None, True, -1, 0, 10**12, 10**30, 1.5, 1e308, "", "x", "../..", [], [[]], {}, {"a": {"b": []}}, float("nan")]


def edit_entry(file: str, inside: tuple = ()) -> Damage:
    """Removes an entry drawn at random, or puts something odd there."""

    def apply(folder: Path, rng: random.Random) -> None:
        found = json.loads((folder / file).read_text())
        found_places = [p for p in places(found) if p[: len(inside)] == inside and p[:1] != ("export",)]
        place = rng.choice(found_places)
        put(found, place, rng.choice(ODD), remove=rng.random() < 0.3)
        (folder / file).write_text(json.dumps(found))

    return apply


def write(file: str, content: bytes | Callable[[bytes], bytes]) -> Damage:
    def apply(folder: Path, rng: random.Random) -> None:
        before = (folder / file).read_bytes()
        (folder / file).write_bytes(content if isinstance(content, bytes) else content(before))

    return apply


def texts(file: str) -> dict[str, Damage]:
    return {
        f"{file} empty": write(file, b""),
        f"{file} null": write(file, b"null"),
        f"{file} list": write(file, b"[]"),
        f"{file} deep": write(file, b'{"a":' * 20000),
        f"{file} digits": write(file, b'{"version": ' + b"9" * 5000 + b"}"),
        f"{file} no text": write(file, b"\xff\xfe\x00\x01"),
        f"{file} cut": write(file, lambda before: before[: len(before) // 2]),
        f"{file} spaces": write(file, lambda before: b"\n\t " + before.replace(b",", b" ,\n") + b"  "),
    }


QUANTIZATION: dict[str, Damage] = {
    f"quantization_config {n}": edit_entry(CONFIG, ("quantization_config",)) for n in range(40)
}
CONFIGS: dict[str, Damage] = {**texts(CONFIG), **{f"config {n}": edit_entry(CONFIG) for n in range(40)}}
REPORTS: dict[str, Damage] = {**texts(REPORT), **{f"report {n}": edit_entry(REPORT) for n in range(20)}}


@pytest.mark.slow
def test_damaged_quantization_config(intact, tmp_path, soak):
    cases = some(QUANTIZATION, soak)
    assert run(intact, "portable packed", tmp_path, cases) > len(cases)


@pytest.mark.slow
def test_damaged_config(intact, tmp_path):
    run(intact, "fused dense", tmp_path, CONFIGS, ways=("load_model", "from_pretrained"))
    run(intact, "fused dense", tmp_path, texts(CONFIG), ways=("export",))


@pytest.mark.slow
def test_damaged_report(intact, tmp_path):
    run(intact, "fused packed", tmp_path, REPORTS, ways=("export",))


@pytest.mark.slow
def test_damaged_index(intact, tmp_path, soak):
    sharded = {"sharded": tmp_path / "sharded"}
    model = folders.model_of("llama", fused=True, dtype=torch.bfloat16, **SMALL)
    export(folders.save(model, tmp_path / "saved", shard="8KB"), sharded["sharded"], "dense")
    index = f"{WEIGHTS}.index.json"
    outside = intact["portable packed"] / WEIGHTS

    def point(to: str) -> Damage:
        def apply(folder: Path, rng: random.Random) -> None:
            def change(found: dict) -> None:
                name = rng.choice(sorted(found["weight_map"]))
                found["weight_map"][name] = to

            folders.edit_json(folder / index, change)

        return apply

    cases = {
        **texts(index),
        **{f"index {n}": edit_entry(index, ("weight_map",)) for n in range(15)},
        **{f"to {to}": point(to) for to in (str(outside), f"../{WEIGHTS}", "nothing.safetensors", CONFIG, ".", "\0")},
        "no map": write(index, b"{}"),
        "no shard": lambda folder, rng: next(folder.glob("*-00002-*")).unlink(),
    }
    assert run(sharded, "sharded", tmp_path, some(cases, soak)) > (40 if soak else 25)
