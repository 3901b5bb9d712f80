"""The tensors of a checkpoint: one safetensors file a process, and an index of their pieces.

Every tensor is treated as flat. A process holds a piece of it, which is a range of its elements:
all elements, or those of some rows if FSDP2 has sharded the tensor. A tensor is complete if its
pieces follow each other from its first element to its last, no matter which process wrote them. So
any number of processes can read a checkpoint that any other number wrote.
"""

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mezzo_core.errors import UserError
from mezzo_core.nn.checkpoint import current_name
from mezzo_core.nn.sharded import is_part

# The names that safetensors gives to types. `write_shard` writes the format itself, because the
# library's writer holds a whole file in memory and computes no checksums.
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class DamagedError(UserError):
    """The files of a checkpoint differ from what was saved."""


class Piece(NamedTuple):
    """A range of a flat tensor's elements, in one process's file under the tensor's name."""

    process: int
    start: int
    length: int
    crc32: int


class Stored(NamedTuple):
    """A tensor of the checkpoint; `dtype` is torch's name of the type, without "torch."."""

    shape: tuple[int, ...]
    dtype: str
    pieces: list[Piece]
    name: str
    """Its name in the files; an older version may have used another name than today's."""


Index = dict[str, Stored]


def shard_name(process: int) -> str:
    """Return the path, inside a checkpoint, of one process's tensors."""
    return f"state/process-{process}.safetensors"


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors to save, by name; loading writes into the same tensors.

    AdamW's step counters are left out, because they equal the checkpoint's step.
    """
    tensors = {f"model.{name}": value for name, value in _persistent(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if key != "step":
                tensors[f"optim.{name}.{key}"] = value
    return tensors


def write_shard(path: Path, tensors: Mapping[str, Tensor], process: int) -> Index:
    """Write this process's pieces to a new safetensors file, and flush it to disk.

    The checksum of a piece is computed while it is written. A tensor that is not sharded, and so
    the same in every process, is written by the first process only.

    Returns:
        An index of all tensors, each with the piece that was written, or with no piece.

    Raises:
        OSError: if the file cannot be written.
    """
    index: Index = {}
    held: dict[str, Tensor] = {}
    for name, value in tensors.items():
        local, start = _local(value)
        writes = local.numel() > 0 and (is_part(value) or process == 0)
        pieces = [Piece(process, start, local.numel(), 0)] if writes else []
        index[name] = Stored(tuple(value.shape), _dtype(value), pieces, name)
        if writes:
            held[name] = local
    # Sorted from the widest type on, so that each tensor starts at a multiple of its type's size.
    names = sorted(held, key=lambda name: -held[name].itemsize)
    with path.open("xb") as file, ThreadPoolExecutor(1) as other_thread:
        file.write(_header({name: held[name] for name in names}))
        for name in names:
            data = held[name].cpu().reshape(-1).view(torch.uint8).numpy().data
            checksum = other_thread.submit(zlib.crc32, data)
            file.write(data)
            pieces = index[name].pieces
            pieces[0] = pieces[0]._replace(crc32=checksum.result())
        file.flush()
        os.fsync(file.fileno())
    return index


def index_to_json(parts: Sequence[Index]) -> dict[str, Any]:
    """Return the index of all processes together as plain JSON; `index_from_json` reads it."""
    return {
        name: {
            "shape": stored.shape,
            "dtype": stored.dtype,
            "pieces": [piece._asdict() for part in parts for piece in part[name].pieces],
        }
        for name, stored in parts[0].items()
    }


def index_from_json(found: dict[str, Any]) -> Index:
    """Parse an index. Only its types are checked: see `check_index` for its content.

    Raises:
        DamagedError: if it is not an index.
    """
    index: Index = {}
    for name, entry in found.items():
        try:
            pieces = [Piece(**piece) for piece in entry["pieces"]]
            stored = Stored(tuple(entry["shape"]), entry["dtype"], pieces, name)
        except (KeyError, TypeError):
            raise DamagedError(f"its index does not describe {name!r}") from None
        numbers = [*stored.shape, *(number for piece in pieces for number in piece)]
        if not all(type(number) is int for number in numbers):
            raise DamagedError(f"its index does not describe {name!r} in whole numbers")
        kind, dot, rest = name.partition(".")
        index[f"{kind}{dot}{current_name(rest)}"] = stored
    return index


def check_index(index: Index, tensors: Mapping[str, Tensor], processes: int) -> None:
    """Check that an index describes exactly these tensors, and all of their elements.

    Raises:
        UserError: if names, shapes or types differ; the message lists the differences.
        DamagedError: if a tensor's pieces overlap or leave a gap.
    """
    differences = [f"has no {name}" for name in tensors if name not in index]
    differences += [f"has {name!r} besides" for name in index if name not in tensors]
    for name, value in tensors.items():
        wanted = tuple(value.shape), _dtype(value)
        if name in index and index[name][:2] != wanted:
            was, now = (f"{dtype} {shape}" for shape, dtype in (index[name][:2], wanted))
            differences.append(f"has {name} as {was}, not {now}")
    if differences:
        more = f" and {len(differences) - 3} more differences" if len(differences) > 3 else ""
        raise UserError(f"it holds another model: it {', '.join(differences[:3])}{more}")
    for name, stored in index.items():
        if not _is_whole(stored, processes):
            raise DamagedError(f"its index does not hold {name} whole and once")


@torch.no_grad()
def read_tensors(folder: Path, index: Index, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite this process's part of each tensor by the checkpoint. Call `check_index` first.

    Raises:
        DamagedError: if a needed file is missing, unreadable or not as it was saved. Some tensors
            may then have been overwritten already.
    """
    with ExitStack() as stack:
        files: dict[int, Any] = {}
        for name, value in tensors.items():
            local, start = _local(value)
            end = start + local.numel()
            parts = []
            for piece in sorted(index[name].pieces, key=lambda piece: piece.start):
                first, last = max(start, piece.start), min(end, piece.start + piece.length)
                if first < last:
                    path = folder / shard_name(piece.process)
                    if piece.process not in files:
                        files[piece.process] = stack.enter_context(_open(path))
                    found = _read(path, files[piece.process], index[name], piece)
                    parts.append(found[first - piece.start : last - piece.start])
            if parts:
                local.copy_(torch.cat(parts).view(local.shape))


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error


def _read(path: Path, file: Any, stored: Stored, piece: Piece) -> Tensor:
    """Return a piece as a flat tensor, after comparing its checksum."""
    try:
        found: Tensor = file.get_tensor(stored.name).reshape(-1)
    except SafetensorError as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    checksum = zlib.crc32(found.view(torch.uint8).numpy().data)
    if (_dtype(found), found.numel(), checksum) != (stored.dtype, piece.length, piece.crc32):
        raise DamagedError(f"{path} does not hold {stored.name} as it was saved")
    return found


def _is_whole(stored: Stored, processes: int) -> bool:
    end = 0
    for piece in sorted(stored.pieces, key=lambda piece: piece.start):
        if piece.start != end or piece.length < 1 or not 0 <= piece.process < processes:
            return False
        end += piece.length
    return end == math.prod(stored.shape)


def _local(value: Tensor) -> tuple[Tensor, int]:
    """Return this process's part of a tensor, and where it begins in the flat tensor."""
    if not is_part(value):
        return value.detach(), 0
    from torch.distributed.tensor import Shard

    if value.placements != (Shard(0),):
        raise NotImplementedError(f"only rows can be sharded, got {value.placements}")
    # FSDP2 gives all processes equally many rows, except that the last ones may get fewer or none.
    rows = -(-value.shape[0] // value.device_mesh.size())
    first_row = min(value.device_mesh.get_local_rank() * rows, value.shape[0])
    return value.to_local().detach(), first_row * math.prod(value.shape[1:])


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the header of a safetensors file; the tensors' bytes follow it in the same order."""
    entries, end = {}, 0
    for name, value in tensors.items():
        begin, end = end, end + value.nbytes
        entries[name] = {
            "dtype": _CODES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _persistent(model: nn.Module) -> dict[str, Tensor]:
    seen: dict[int, str] = {}
    # A tied weight has two names in the state dict; only the first is kept.
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if seen.setdefault(id(value), name) == name
    }
