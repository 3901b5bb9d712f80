"""SentencePiece models of byte pair encoding, as Llama's, for the `tokenizers` library."""

from collections.abc import Iterator
from itertools import chain, product
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from mezzo_core.data.tokenizers import SentencePieceTokenizer
from mezzo_core.errors import UserError
from mezzo_core.libraries import library_errors

_SPACE = "▁"  # how the pieces write it
_TEXTS = ("", " ", "  a  b ", "\n", " \n\n\t x\r\n", "</s><s><unk><0x0A>", "é é日本語 e\u0301 🙂🙂")


def to_backend(tokenizer: SentencePieceTokenizer) -> Backend:
    """Return the tokenizer with the same tokens for every text.

    Raises:
        UserError: if there is none: the model normalizes texts, or is no byte pair encoding.
    """
    processor = tokenizer.processor
    with library_errors(f"{tokenizer.name} cannot be written as a tokenizer.json"):
        backend = _convert(processor)
    pieces = [processor.id_to_piece(i).replace(_SPACE, " ") for i in range(tokenizer.vocab_size)]
    codes = [code for code in range(1, 0x30000) if not 0xD800 <= code < 0xE000]  # no surrogates
    letters = ("".join(map(chr, codes[i : i + 64])) for i in range(0, len(codes), 64))
    spaces = (" " * count for count in range(2, 64))
    # `_overlaps` comes last: in another kind of model all scores may be equal, and it is refused
    # before `_overlaps` would yield every pair.
    texts = chain(_TEXTS, spaces, letters, pieces, ["".join(pieces)], _overlaps(processor))
    for text in texts:
        wanted = tokenizer.encode(text)
        if backend.encode(text).ids != wanted or backend.decode(wanted) != tokenizer.decode(wanted):
            raise UserError(
                f"{tokenizer.name} cannot be written as a tokenizer.json: {text[:40]!r}, a text of "
                f"{len(text)} characters, would be other tokens there, or come back otherwise. "
                "Most byte pair encodings that keep texts as they are can be, and no others "
                "(normalization_rule_name=identity, byte_fallback=True, "
                "remove_extra_whitespaces=False)"
            )
    return backend


def _overlaps(processor: Any) -> Iterator[str]:
    """Yield texts in which two pieces of equal score overlap: SentencePiece merges the left one."""
    tied: dict[float, list[str]] = {}
    for i in range(processor.vocab_size()):
        piece = processor.id_to_piece(i)
        if len(piece) > 1 and not (processor.is_byte(i) or processor.is_control(i)):
            tied.setdefault(processor.get_score(i), []).append(piece.replace(_SPACE, " "))
    for left, right in (pair for pieces in tied.values() for pair in product(pieces, repeat=2)):
        for k in range(1, min(len(left), len(right))):
            if left.endswith(right[:k]):
                yield f"\n{left}{right[k:]}"  # nothing before it is merged with it


def _convert(processor: Any) -> Backend:
    names = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    special = [i for i in range(len(names)) if processor.is_control(i) or processor.is_unknown(i)]
    bytes_ = [i for i in range(len(names)) if processor.is_byte(i)]
    parts = {name: i for i, name in enumerate(names) if i not in {*special, *bytes_}}
    # Pieces with better scores are merged first. Among equal ones, such as Mistral's spaces,
    # SentencePiece merges the leftmost again and again: so the longest left part comes first.
    merges = [
        (-processor.get_score(number), -k, parts[name[:k]], parts[name[k:]], (name[:k], name[k:]))
        for name, number in parts.items()
        for k in range(1, len(name))
        if name[:k] in parts and name[k:] in parts
    ]
    model = models.BPE(
        {name: i for i, name in enumerate(names)},
        [pair for *_, pair in sorted(merges)],
        unk_token=names[processor.unk_id()],
        fuse_unk=True,
        byte_fallback=bool(bytes_),
    )
    backend = Backend(model)
    replaced = normalizers.Replace(" ", _SPACE)
    begins = processor.encode("a", out_type=str)[0].startswith(_SPACE)
    prefix = [normalizers.Prepend(_SPACE)] if begins else []
    backend.normalizer = normalizers.Sequence([*prefix, replaced])
    strip = [decoders.Strip(" ", 1, 0)] if begins else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    backend.add_special_tokens([names[i] for i in special])
    backend.encode_special_tokens = True  # "</s>" in a text is text
    return backend
