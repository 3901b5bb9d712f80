"""Small tokenizers of every kind."""

import pytest


@pytest.fixture(scope="session")
def sentences():
    """What the tokenizers learn from."""
    return [
        "It is a truth universally acknowledged, that a single man in possession of a good fortune",
        "must be in want of a wife. However little known the feelings or views of such a man may",
    ]


@pytest.fixture(scope="session")
def train_sentencepiece(sentences):
    """Train a small SentencePiece model, PREFIX.model; return its path."""
    sentencepiece = pytest.importorskip("sentencepiece")

    def train(prefix, vocab_size, **options):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_prefix=str(prefix),
            vocab_size=vocab_size,
            model_type="bpe",
            minloglevel=2,
            **options,
        )
        return f"{prefix}.model"

    return train


@pytest.fixture(scope="session")
def names(tmp_path_factory, sentences, train_sentencepiece):
    """One small tokenizer of each kind, by the name that loads it."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sentences, trainer)
    names = {"byte": "byte"}
    for kind, vocab, merges in (
        ("gpt2", "encoder.json", "vocab.bpe"),
        ("later", "vocab.json", "merges.txt"),
    ):
        (folder / kind).mkdir()
        bpe.model.save(str(folder / kind))
        (folder / kind / "vocab.json").rename(folder / kind / vocab)
        (folder / kind / "merges.txt").rename(folder / kind / merges)
        names[kind] = str(folder / kind)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    bpe.enable_truncation(4)
    bpe.save(str(folder / "tokenizer.json"))
    names["json"] = str(folder / "tokenizer.json")
    # As converted from Llama's SentencePiece: characters without a token are bytes.
    words = [f"<0x{i:02X}>" for i in range(256)] + ["</s>", "▁", *"adefgimnoprsuw"]
    llama = tokenizers.Tokenizer(
        tokenizers.models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True)
    )
    llama.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    llama.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    llama.add_special_tokens(["</s>"])
    names["llama"] = str(folder / "llama.json")
    llama.save(names["llama"])
    kept = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    names["sentencepiece"] = train_sentencepiece(folder / "small", 300, byte_fallback=True, **kept)
    return names
