"""Our tokenizers as tokenizers of transformers, with the same tokens for every text."""

from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mezzo_core.data.tokenizers import ByteTokenizer, HFTokenizer, SentencePieceTokenizer, Tokenizer
from mezzo_core.errors import UserError
from mezzo_core.hub.sentencepiece import to_backend

_END = "<|endoftext|>"


def to_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return the tokenizer for transformers.

    Padding goes to the left, where `generate` wants it. It is the tokenizer's own token for it if
    the model knows that one, else the token that ends a document.

    Raises:
        UserError: if the `tokenizers` library cannot give the same tokens, as of some SentencePiece
            models.
    """
    if isinstance(tokenizer, ByteTokenizer):
        backend = _bytes()
    elif isinstance(tokenizer, HFTokenizer):
        backend = Backend.from_str(tokenizer.backend.to_str())  # a copy
    elif isinstance(tokenizer, SentencePieceTokenizer):
        backend = to_backend(tokenizer)
    else:
        raise UserError(f"{type(tokenizer).__name__} cannot be written as a tokenizer.json")
    end = backend.id_to_token(tokenizer.eos_token)
    named: dict[str, Any] = {"eos_token": end, "pad_token": end}
    if isinstance(tokenizer, HFTokenizer):
        named["pad_token"] = backend.id_to_token(tokenizer.pad_token)
    if tokenizer.bos_token is not None:
        named["bos_token"] = begin = backend.id_to_token(tokenizer.bos_token)
        if tokenizer.begin_tokens:
            pair = (begin, tokenizer.bos_token)
            backend.post_processor = processors.TemplateProcessing(
                single=f"{begin}:0 $A:0",
                pair=f"{begin}:0 $A:0 {begin}:1 $B:1",
                special_tokens=[pair],
            )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "</s>" in a text is text
        **named,
    )


def _bytes() -> Backend:
    """Return the byte tokenizer: byte-level encoding without merges."""
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    backend = Backend(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_END])
    return backend
