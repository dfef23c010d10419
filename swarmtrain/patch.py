"""`swarmtrain patch`: the exact difference between two safetensors files, for anyone who ships fine-tunes.

Files are mapped, not loaded: memory stays far below the model's size. A result is written under a temporary name and
renamed only after its hash has been verified.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarmtrain.errors import Incompatible, UserError, one_line

if TYPE_CHECKING:
    from swarm_compression import Digest, Layout, State

_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
_NEW_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group(short_help="Exact differences between two sets of weights.")
def patch() -> None:
    """Make, apply and look into lossless patches between two safetensors files."""


@patch.command("diff")
@click.argument("old", type=_FILE)
@click.argument("new", type=_FILE)
@click.option("-o", "--output", type=_NEW_FILE, required=True, help="The patch file to write.")
@click.option(
    "--level",
    type=click.Choice(["fast", "default", "best"]),
    help='Speed against size: "default", or "best" with --history.',
)
@click.option(
    "--history",
    type=_FILE,
    help="The weights before OLD: makes a smaller patch, which needs them again to be applied.",
)
@click.option("--absolute", is_flag=True, help="Hold new values: larger, but may be applied twice.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where the two files are compared; the patch is the same.",
)
def diff(
    old: Path,
    new: Path,
    output: Path,
    level: Any,  # noqa: ANN401
    history: Path | None,
    absolute: bool,
    device: str,
) -> None:
    """Write what turns OLD into NEW, exact to the bit."""
    from swarm_compression import LayoutMismatch, describe

    from swarmtrain.durable import write_durably

    if history and (absolute or level not in (None, "best")):
        raise click.UsageError("--history goes with --level best, and not with --absolute.")
    level = level or ("best" if history else "default")
    with (
        _mapped(old) as (base, base_layout),
        _mapped(new) as (target, layout),
        _mapped_history(history, layout, new) as before,
    ):
        _require_same_tensors(base_layout, layout, old, new)
        base_digest = _digest(base, layout, f"reading {old}")
        new_digest = _digest(target, layout, f"reading {new}")
        with _bar(layout.elements, "comparing") as advance, _disk_errors(output):
            try:
                options = {"level": level, "absolute": absolute, "new_digest": new_digest, "base_digest": base_digest}
                write_durably(output, _compare(base, target, layout, device, on_progress=advance, **options, **before))
            except LayoutMismatch as error:
                raise Incompatible(one_line(f"{old} and {new}: {error}")) from None
    info = describe(output.read_bytes())
    share = info.visible / max(layout.elements, 1)
    ratio = info.state_bytes / info.encoded_bytes
    click.echo(f"{output}: {info.encoded_bytes:,} bytes, {ratio:.1f} times smaller than {new}")
    click.echo(f"{info.visible:,} of {layout.elements:,} elements differ ({share:.3%})")


@patch.command("apply")
@click.argument("old", type=_FILE)
@click.argument("patch_file", metavar="PATCH", type=_FILE)
@click.option("--history", type=_FILE, help="The weights before OLD, if the patch needs them.")
@click.option("-o", "--output", type=_NEW_FILE, required=True, help="The safetensors file to write.")
def apply(old: Path, patch_file: Path, history: Path | None, output: Path) -> None:
    """Apply PATCH to OLD and write the result, verified by its hash.

    Header metadata and the order of tensors are OLD's.
    """
    from swarm_compression import CodecError, LayoutMismatch, WrongBase, WrongHistory, apply_patch_in_place

    from swarmtrain.durable import TEMPORARY_SUFFIX, sync_folder

    temporary = output.with_name(output.name + TEMPORARY_SUFFIX)
    if temporary.exists() and temporary.samefile(old):
        raise UserError(f"{temporary} is needed for a temporary file")
    try:
        with _disk_errors(output):
            shutil.copyfile(old, temporary)
        with (
            _mapped(temporary, writable=True) as (state, layout),
            _mapped_history(history, layout, old) as before,
            patch_file.open("rb") as file,
        ):
            data = file.read()
            digest = _digest(state, layout, f"reading {old}")
            try:
                with _bar(layout.elements, "applying") as advance:
                    apply_patch_in_place(data, state, layout=layout, base_digest=digest, on_progress=advance, **before)
            except WrongBase as error:
                raise Incompatible(
                    f"{patch_file} is made for weights with hash {error.expected.hex()[:16]}; {old} has "
                    f"{error.found.hex()[:16]}: name the file from which the patch was made"
                ) from None
            except WrongHistory as error:
                given = f"; {history} has {error.found.hex()[:16]}" if error.found else ""
                raise Incompatible(
                    f"{patch_file} needs the weights before {old} too, with hash {error.expected.hex()[:16]}{given}: "
                    "name that file with --history"
                ) from None
            except LayoutMismatch as error:
                raise Incompatible(one_line(f"{patch_file} does not fit {old}: {error}")) from None
            except CodecError as error:
                raise _unreadable(patch_file, error) from None
        with _disk_errors(output):
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(output)
            sync_folder(output.parent)
    finally:
        temporary.unlink(missing_ok=True)
    click.echo(f"{output}: verified")


@patch.command("info")
@click.argument("patch_file", metavar="PATCH", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def info(patch_file: Path, as_json: bool) -> None:
    """Say what PATCH holds: codec, tensors, changes, bytes, hashes."""
    from swarm_compression import CodecError, describe

    try:
        found = describe(patch_file.read_bytes())
    except CodecError as error:
        raise _unreadable(patch_file, error) from None
    rows = {
        "codec": found.codec.name.lower(),
        "version": found.version,
        "may_be_applied_twice": found.idempotent,
        "tensors": found.tensors,
        "changed_tensors": found.coded_tensors,
        "changed_elements": found.visible,
        "patch_bytes": found.encoded_bytes,
        "model_bytes": found.state_bytes,
        "base_hash": found.base_hash.hex() if found.base_hash else None,
        "needs_history": found.history_hash.hex() if found.history_hash else None,
        "result_hash": found.result_hash.hex(),
    }
    if as_json:
        click.echo(json.dumps(rows))
        return
    for name, value in rows.items():
        click.echo(f"{name.replace('_', ' '):<21} {_shown(value)}")


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _unreadable(patch_file: Path, error: Exception) -> UserError:
    return UserError(
        one_line(f"{patch_file} cannot be used: {error}; it is no patch, cut short or damaged: fetch or make it again")
    )


@contextlib.contextmanager
def _mapped(path: Path, *, writable: bool = False) -> Iterator[tuple[State, Layout]]:
    """Map a safetensors file: its tensors as arrays of bit patterns over the file, and their layout."""
    import numpy as np
    from swarm_compression import Layout, TensorSpec

    from swarmtrain.tensor_file import TensorFileError, read_entries

    try:
        entries = read_entries(path)
        with path.open("r+b" if writable else "rb") as file:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            mapping = mmap.mmap(file.fileno(), 0, access=access)
    except TensorFileError as error:
        raise UserError(one_line(f"{path}: {error}")) from None
    except OSError as error:
        raise UserError(one_line(f"{path}: {error.strerror or error}")) from None
    layout = Layout(TensorSpec(name, entry.dtype.lower(), entry.shape) for name, entry in entries.items())
    raw = np.frombuffer(mapping, np.uint8)
    state = {
        spec.name: raw[entries[spec.name].start : entries[spec.name].stop]
        .view(spec.kind.bits_dtype)
        .reshape(spec.shape)
        for spec in layout
    }
    yield state, layout
    if writable:
        mapping.flush()
    # The arrays still refer to the mapping; it goes with the last of them.


@contextlib.contextmanager
def _mapped_history(path: Path | None, layout: Layout, beside: Path) -> Iterator[dict[str, Any]]:
    """Map the weights before the base: the codec's arguments for them, none without a file."""
    if path is None:
        yield {}
        return
    with _mapped(path) as (state, history_layout):
        _require_same_tensors(history_layout, layout, path, beside)
        yield {"history": state, "history_digest": _digest(state, layout, f"reading {path}")}


def _require_same_tensors(left: Layout, right: Layout, old: Path, new: Path) -> None:
    if left == right:
        return
    for name in sorted({spec.name for spec in left} ^ {spec.name for spec in right}):
        raise Incompatible(one_line(f"tensor {name!r} is in only one of {old} and {new}"))
    for a, b in zip(left, right, strict=True):
        if a != b:
            raise Incompatible(
                one_line(
                    f"tensor {a.name!r} is {a.dtype} {list(a.shape)} in {old}, but {b.dtype} {list(b.shape)} in {new}"
                )
            )


def _compare(
    base: State,
    new: State,
    layout: Layout,
    device: str,
    *,
    on_progress: Callable[[int], None],
    **options: Any,  # noqa: ANN401
) -> Iterator[bytes]:
    """Yields the patch, compared by NumPy on the CPU and by torch anywhere else."""
    from swarm_compression import stream_changes, stream_patch

    if device == "cpu":
        return stream_patch(new, base, layout=layout, on_progress=on_progress, **options)

    from swarmtrain.tensor_diff import find_changes_of_state

    changes = find_changes_of_state(new, base, layout, device, on_progress=on_progress)
    return stream_changes(base, changes, layout=layout, **options)


def _digest(state: State, layout: Layout, label: str) -> Digest:
    from swarm_compression import Digest, hash_tensor

    hashes = []
    with _bar(layout.elements, label) as advance:
        for spec in layout:
            hashes.append(hash_tensor(state, spec))
            advance(spec.elements)
    return Digest.combine(layout, hashes)


@contextlib.contextmanager
def _bar(length: int, label: str) -> Iterator[Any]:
    """Show a progress bar on stderr while it is a terminal; yields the function that moves it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=max(length, 1), label=label, file=sys.stderr) as bar:
        yield bar.update


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(one_line(f"cannot write {path}: {error.strerror or error}")) from None
