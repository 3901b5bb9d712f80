"""Models go to transformers and come back with the same bits, and so do their tokens."""

import json
import shutil
import stat
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from mezzo_core.config_json import to_json
from mezzo_core.data import DataConfig
from mezzo_core.data.tokenizer_files import load_tokenizer
from mezzo_core.errors import UserError
from mezzo_core.hub import MezzoConfig, MezzoForCausalLM
from mezzo_core.hub.folder import export_model, import_model
from mezzo_core.hub.tokenizer import to_transformers
from mezzo_core.nn import AttentionConfig, LMConfig, generate
from mezzo_core.nn.checkpoint import load_model, save_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from toys.retrieval import RetrievalConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    pipeline,
)
from transformers.utils import hub

CONFIG = LMConfig(257, 16, mixers=(AttentionConfig(head_dim=8),) * 2)
TEXT = "Ein Gürtel, 1 < 2;\n\n  <|endoftext|> </s> 日本 \x00 😀 \r\n end "


def save_run(folder, config=CONFIG, tokenizer="byte", **extra):
    torch.manual_seed(0)
    identity = load_tokenizer(tokenizer).identity
    data = to_json(DataConfig(tokenizer=tokenizer))
    told = {"tokenizer": tokenizer, "tokenizer_identity": identity, "data": data, **extra}
    save_model(config.build(), config, folder / "model", told)
    return folder


@pytest.fixture
def run(tmp_path):
    return save_run(tmp_path / "run")


def weights(folder):
    return load_file(folder / "model/model.safetensors")


def words(folder, *, begin: bool = False):
    """Write a byte-level BPE tokenizer with merges, whose template may add a token."""
    letters = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    merges = [("e", "n"), ("en", "d"), ("Ġ", "end")]
    vocabulary = {**letters, **{a + b: 256 + i for i, (a, b) in enumerate(merges)}}
    backend = Tokenizer(models.BPE({**vocabulary, "</s>": 259, "<s>": 260}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "<s>"])
    if begin:
        backend.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 260)])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return str(folder)


def test_a_model_goes_out_and_comes_back_with_the_same_bits(run, tmp_path):
    files = export_model(run, tmp_path / "out")
    assert {"config.json", "generation_config.json", "model.safetensors"} < set(files)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model, config, extra = load_model(run / "model")
    tokens = torch.randint(257, (2, 9))
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    import_model(tmp_path / "out", tmp_path / "back")
    assert load_model(tmp_path / "back/model")[1:] == (config, extra)
    mine, theirs = weights(run), weights(tmp_path / "back")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_model_is_pushed_to_a_hub_and_read_from_there(run, tmp_path, monkeypatch):
    """A folder stands for the hub, on whose server nothing is written here."""
    there = tmp_path / "hub"
    there.mkdir()

    def create_commit(repo_id, operations, **_):
        for each in operations:
            with each.as_file() as content:
                (there / each.path_in_repo).write_bytes(content.read())

    calls = {
        "create_repo": lambda repo_id, **_: SimpleNamespace(repo_id=repo_id),
        "create_commit": create_commit,
    }
    monkeypatch.setattr(hub, "hf_api", lambda: SimpleNamespace(**calls), raising=False)
    for name, call in calls.items():  # where they were functions, as in transformers 5.6
        monkeypatch.setattr(hub, name, call, raising=False)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: ModelCard("A model"))
    export_model(run, tmp_path / "out")
    mine = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    mine.push_to_hub("somebody/model")
    theirs = AutoModelForCausalLM.from_pretrained(there)
    tokens = torch.randint(257, (2, 9))
    assert torch.equal(theirs(tokens).logits, mine(tokens).logits)


def test_half_precision_and_untied_heads_stay(tmp_path):
    torch.manual_seed(0)
    config = replace(CONFIG, tie_embeddings=False)
    save_model(config.build().bfloat16(), config, tmp_path / "run/model")
    export_model(tmp_path / "run", tmp_path / "out")
    import_model(tmp_path / "out", tmp_path / "back")
    mine, theirs = weights(tmp_path / "run"), weights(tmp_path / "back")
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert {weight.dtype for weight in theirs.values()} == {torch.bfloat16}


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_tokenizer_gives_the_same_tokens_and_texts(tmp_path, add_bos):
    given = words(tmp_path / "words", begin=True)
    for name in ["byte", given][add_bos:]:
        mine = load_tokenizer(name, add_bos=add_bos)
        to_transformers(mine).save_pretrained(tmp_path / "out")
        theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
        tokens = [*mine.begin_tokens, *mine.encode(TEXT)]
        assert theirs(TEXT)["input_ids"] == tokens
        assert theirs.decode(tokens, skip_special_tokens=True) == mine.decode(tokens) == TEXT
        assert (theirs.eos_token_id, theirs.bos_token_id) == (mine.eos_token, mine.bos_token)


def test_a_pipeline_writes_what_generate_does(run, tmp_path):
    export_model(run, tmp_path / "out")
    write = pipeline("text-generation", str(tmp_path / "out"), device="cpu", batch_size=3)
    prompts = ["It is", "A truth universally acknowledged", "x"]
    asked = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    found = [answer[0]["generated_text"] for answer in write(prompts, **asked)]
    tokenizer = load_tokenizer("byte")
    tokens = [tokenizer.encode(prompt) for prompt in prompts]
    new = generate(load_model(run / "model")[0], tokens, max_new_tokens=12, stop_tokens=(256,))
    assert found == [tokenizer.decode(row) for row in new]


def test_a_text_to_stop_at_ends_what_is_generated(run, tmp_path):
    export_model(run, tmp_path / "out")
    model, tokenizer = (
        kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    asked = {"max_new_tokens": 12, "do_sample": False}
    prompt = tokenizer("It is ", return_tensors="pt")
    whole = model.generate(**prompt, **asked)
    text = tokenizer.decode(whole[0, 9:10])
    found = model.generate(**prompt, **asked, stop_strings=[text], tokenizer=tokenizer)
    end = whole[0].tolist().index(int(whole[0, 9]), 6) + 1
    assert torch.equal(found, whole[:, :end])


def test_a_tokenizer_that_was_moved_is_found_in_the_folder(tmp_path):
    name = words(tmp_path / "words", begin=True)
    data = DataConfig("a.txt", name, validation_fraction=0.3, add_bos=True)
    told = {"tokenizer_identity": load_tokenizer(name, add_bos=True).identity}
    config = replace(CONFIG, vocab_size=261)
    run = save_run(tmp_path / "run", config, name, data=to_json(data), **told)
    export_model(run, tmp_path / "out")
    shutil.rmtree(name)
    import_model(tmp_path / "out", tmp_path / "back")
    _, _, extra = load_model(tmp_path / "back/model")
    assert extra["tokenizer"] == str(tmp_path / "out")
    assert extra["data"] == to_json(replace(data, tokenizer=extra["tokenizer"]))
    known = load_tokenizer(extra["tokenizer"], add_bos=True)
    assert known.identity == extra["tokenizer_identity"]
    with pytest.raises(UserError, match="words"):
        export_model(run, tmp_path / "again")


@pytest.mark.parametrize(
    ("padding", "token"), [(None, 259), ("en", 256), ("<s>", 259), ("gone", 259)]
)  # the model has no embedding of "<s>"
def test_tokens_to_stop_at_and_for_padding_are_told(tmp_path, padding, token):
    name = words(tmp_path / "words")
    told = {"eos_token": "</s>", "pad_token": padding}
    (tmp_path / "words/tokenizer_config.json").write_text(json.dumps(told))
    (tmp_path / "words/generation_config.json").write_text('{"eos_token_id": [259, 3]}')
    run = save_run(tmp_path / "run", replace(CONFIG, vocab_size=261), name)
    export_model(run, tmp_path / "out")
    told = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (sorted(told.eos_token_id), told.pad_token_id) == ([3, 259], token)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token_id == token


def test_layers_of_another_package_need_leave_both_ways(tmp_path):
    config = LMConfig(257, 16, stack=RetrievalConfig())
    run = save_run(tmp_path / "run", config)
    with pytest.raises(UserError, match="toys"):
        export_model(run, tmp_path / "out")
    export_model(run, tmp_path / "out", allow_packages=("toys",))
    with pytest.raises(UserError, match="toys"):
        import_model(tmp_path / "out", tmp_path / "back")
    import_model(tmp_path / "out", tmp_path / "back", allow_packages=("toys",))
    assert weights(tmp_path / "back").keys() == weights(run).keys()


def drop_weight(folder):
    kept = load_file(folder / "model.safetensors")
    del kept["lm.stack.blocks.1.mixer.wk.weight"]
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def reshape_weight(folder):
    change(folder, lambda config: config["lm"]["mixers"][0].update(num_kv_heads=1))


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def change(folder, edit):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


DAMAGE = {
    "no weights that fit the model for lm.stack.blocks.1.mixer.wk.weight": drop_weight,
    "no weights that fit the model for lm.stack.blocks.0.mixer.wk.weight": reshape_weight,
    "out cannot be read: ": cut,
    "it has no config.json": lambda folder: (folder / "config.json").unlink(),
    "must be one of mezzo, llama, mistral, qwen2, qwen3, got 'gpt2'": lambda folder: change(
        folder, lambda config: config.update(model_type="gpt2")
    ),
    "got None .a run of mezzo needs no import": lambda folder: change(
        folder, lambda config: config.pop("model_type")
    ),
    '"lm" is missing': lambda folder: change(folder, lambda config: config.pop("lm")),
    "has no field 'depth'": lambda folder: change(
        folder, lambda config: config["lm"].update(depth=3)
    ),
    "type 'os:System' is not from an allowed package": lambda folder: change(
        folder, lambda config: config["lm"].update(type="os:System")
    ),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_a_damaged_folder_is_one_line(run, tmp_path, words):
    export_model(run, tmp_path / "out")
    DAMAGE[words](tmp_path / "out")
    with pytest.raises(UserError, match=words) as told:
        import_model(tmp_path / "out", tmp_path / "back")
    assert len(str(told.value).splitlines()) == 1
    assert not (tmp_path / "back").exists()


def test_nothing_is_overwritten(run, tmp_path):
    export_model(run, tmp_path / "out")
    with pytest.raises(UserError, match="must be a new folder or an empty one"):
        export_model(run, tmp_path / "out")
    with pytest.raises(UserError, match="is there already"):
        import_model(tmp_path / "out", run)


def test_an_export_to_a_full_disk_can_be_tried_again(run, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(GenerationConfig, "save_pretrained", fail)
        with pytest.raises(UserError, match=r"cannot write .*out: No space left on device"):
            export_model(run, tmp_path / "out")
    assert "model.safetensors" in export_model(run, tmp_path / "out")


KINDS = [LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM]


SCALINGS = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"factor": 8.0, "original_max_position_embeddings": 32},
    "linear": {"factor": 3.0},
}


@pytest.mark.parametrize("scaling", [None, "llama3", "linear"])
@pytest.mark.parametrize(("kind", "tied"), [*zip(KINDS, (True, False, True, False), strict=True)])
def test_a_llama_is_read_with_its_tokenizer_and_has_its_logits(tmp_path, kind, tied, scaling):
    torch.manual_seed(0)
    sizes = {"vocab_size": 261, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    # Each scaling comes with a width of all heads besides the model's, and each with most kinds.
    heads["head_dim"] = {None: 8, "llama3": 16, "linear": 6}[scaling]
    rope = {"rope_type": scaling or "default", "rope_theta": 500.0, **SCALINGS.get(scaling, {})}
    more = {"rope_parameters": rope, "tie_word_embeddings": tied, "rms_norm_eps": 0.01}
    theirs = kind(kind.config_class(**sizes, **heads, **more)).eval()
    with torch.no_grad():  # norms and biases are ones and zeros at the start
        for weight in theirs.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    name = words(tmp_path / "theirs", begin=True)
    theirs.save_pretrained(name)
    import_model(name, tmp_path / "run")
    model, config, extra = load_model(tmp_path / "run/model")
    tokens = torch.randint(261, (2, 70))
    torch.testing.assert_close(model(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    assert generate(model, tokens.tolist(), max_new_tokens=5) == [
        row[70:] for row in theirs.generate(tokens, max_new_tokens=5, do_sample=False).tolist()
    ]
    export_model(tmp_path / "run", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert config.tie_embeddings == tied
    assert extra["data"]["add_bos"]
    assert extra["tokenizer"] == name


def test_biases_get_the_dtype_of_their_matrices(tmp_path):
    sizes = {"vocab_size": 261, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2ForCausalLM.config_class(**sizes, **heads, tie_word_embeddings=False)
    theirs = Qwen2ForCausalLM(config).bfloat16()
    theirs.lm_head.float()
    name = words(tmp_path / "theirs", begin=True)
    theirs.save_pretrained(name)
    import_model(name, tmp_path / "run")
    model, _, _ = load_model(tmp_path / "run/model")
    assert {w.dtype for n, w in model.named_parameters() if n.endswith("bias")} == {torch.float32}
    assert model.norm.weight.dtype == torch.bfloat16
    theirs.bfloat16().model.norm.float()
    theirs.save_pretrained(name)
    import_model(name, tmp_path / "wide norm")
    model, _, _ = load_model(tmp_path / "wide norm/model")
    assert (model.norm.weight.dtype, model.head.weight.dtype) == (torch.float32, torch.bfloat16)
    assert generate(model, [[1, 2]], max_new_tokens=2)


def test_the_commands_write_and_read(run, tmp_path, run_command):
    code, out, err = run_command("export", run, tmp_path / "out")
    assert (code, err) == (0, "")
    assert "tokenizer.json" in out
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == {stat.S_IMODE((run / "model/config.json").stat().st_mode)}
    code, out, err = run_command("import", tmp_path / "out", tmp_path / "back")
    assert (code, err) == (0, "")
    assert str(tmp_path / "back/model") in out
    code, out, err = run_command("export", tmp_path, tmp_path / "none")
    assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_a_model_that_is_held_is_not_copied():
    lm = CONFIG.build()
    model = MezzoForCausalLM.around(lm, MezzoConfig(CONFIG))
    assert model.lm is lm
    assert not any(weight.is_meta for weight in model.parameters())
