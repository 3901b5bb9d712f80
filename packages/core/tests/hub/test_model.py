"""An LM in the libraries around transformers: Trainer, accelerate, PEFT, pipeline."""

import copy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator, cpu_offload
from mezzo_core.errors import UserError
from mezzo_core.hub import MezzoCache, MezzoConfig, MezzoForCausalLM
from mezzo_core.hub.model import CACHE
from mezzo_core.hub.replace import replace_attention
from mezzo_core.nn import AttentionConfig, LMConfig, generate
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint
from toys.retrieval import RetrievalConfig
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

WINDOW = AttentionConfig(head_dim=8, window_size=5)
CONFIG = LMConfig(17, 16, mixers=(WINDOW, AttentionConfig(head_dim=8)))
TOKENS = torch.arange(20).remainder(5).expand(8, -1)


def built(config: LMConfig = CONFIG, seed: int = 0) -> MezzoForCausalLM:
    torch.manual_seed(seed)
    return MezzoForCausalLM(MezzoConfig(config)).eval()


@pytest.fixture
def model():
    return built()


def peaked(seed: int) -> MezzoForCausalLM:
    """Return a model whose tokens differ along a row."""
    model = built(seed=seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5 if weight.ndim == 2 else 1)
    return model


def arguments(folder, **changes):
    settings = {
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **{**settings, **changes})


def data(num_rows: int = 8):
    rows = torch.stack([torch.arange(20).add(i).remainder(5) for i in range(num_rows)])
    return [{"input_ids": row, "labels": row} for row in rows]


def test_trainer_trains_saves_and_resumes(model, tmp_path):
    first = Trainer(model, arguments(tmp_path), train_dataset=data(), eval_dataset=data())
    before = first.evaluate()["eval_loss"]
    first.train()
    assert first.evaluate()["eval_loss"] < before - 0.1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert loaded.lm.head.weight is loaded.lm.embed.weight
    assert torch.equal(loaded(TOKENS).logits, model.eval()(TOKENS).logits)
    again = built()
    Trainer(again, arguments(tmp_path), train_dataset=data()).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-2")
    )
    assert torch.equal(again.eval()(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("kind", ["mezzo", "llama"])
def test_with_label_smoothing_the_trainer_asks_for_the_next_token(tmp_path, kind):
    model = peaked(0)
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2,
        )  # fmt: skip
        model = replace_attention(LlamaForCausalLM(config), AttentionConfig(head_dim=8)).eval()
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    found = Trainer(model, args, eval_dataset=data()).evaluate()["eval_loss"]
    logs = model.eval()(torch.stack([row["input_ids"] for row in data()])).logits.log_softmax(-1)
    targets = torch.stack([row["labels"] for row in data()])[:, 1:, None]
    loss = -0.9 * logs[:, :-1].gather(2, targets).mean() - 0.1 * logs[:, :-1].mean()
    assert found == pytest.approx(loss.item(), rel=1e-4)


def test_accumulated_gradients_are_those_of_one_batch(tmp_path):
    """Rows have labels of different numbers, so a mean of means would be another loss."""
    rows = data()
    for i, row in enumerate(rows):
        row["labels"] = row["labels"].masked_fill(torch.arange(20) < 2 * i, -100)
    weights = []
    for size in (8, 2):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        model = built()
        args = arguments(tmp_path / str(size), max_steps=2, optim="sgd", **settings)
        Trainer(model, args, train_dataset=rows).train()
        weights.append(torch.cat([weight.flatten() for weight in model.parameters()]))
    torch.testing.assert_close(*weights)


def test_accelerate_runs_a_plain_loop(model):
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    losses = []
    for _ in range(4):
        loss = prepared(input_ids=TOKENS, labels=TOKENS).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.equal(accelerator.unwrap_model(prepared).lm(TOKENS).logits, model(TOKENS).logits)


def test_an_adapter_is_saved_and_loaded(model, tmp_path):
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(built(), tmp_path)
    assert torch.equal(loaded(TOKENS).logits, adapted(TOKENS).logits)
    assert not torch.equal(loaded(TOKENS).logits, built()(TOKENS).logits)


def test_an_adapter_of_a_head_that_shares_the_embeddings_weight_is_loaded(model, tmp_path):
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["head"]))
    torch.nn.init.normal_(adapted.base_model.model.lm.head.lora_B["default"].weight)
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(built(), tmp_path).double()
    logits = loaded(TOKENS).logits
    torch.testing.assert_close(logits, adapted.double()(TOKENS).logits)
    lm = loaded.base_model.model.lm
    assert lm.head.weight is lm.embed.weight


def test_a_prompt_of_embeddings_is_learned(model):
    sizes = {"num_layers": 2, "num_attention_heads": 2, "token_dim": 16}
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, **sizes)
    tuned = get_peft_model(model, config)
    tuned(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS), labels=TOKENS).loss.backward()
    learned = [weight for weight in tuned.parameters() if weight.grad is not None]
    assert [weight.shape for weight in learned] == [(3, 16)]
    assert learned[0].grad.abs().amax(-1).gt(0).all()
    tuned.eval()
    with_cache, without = (
        tuned.generate(input_ids=TOKENS, max_new_tokens=4, do_sample=False, use_cache=use_cache)
        for use_cache in (True, False)
    )
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize("use_cache", [False, True])
def test_the_logits_of_any_places_can_be_asked_for(model, use_cache):
    mask = torch.ones_like(TOKENS)
    mask[1, :4] = 0
    ask = partial(model, TOKENS, attention_mask=mask, use_cache=use_cache)
    places = torch.tensor([7, 19])
    assert torch.equal(ask(logits_to_keep=places).logits, ask().logits[:, places])
    assert torch.equal(ask(logits_to_keep=3).logits, ask().logits[:, -3:])


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_one_kept_logit_is_that_of_a_row_s_last_real_token(model, use_cache, hidden):
    mask = torch.ones_like(TOKENS)
    mask[1, 12:] = 0
    ask = partial(model, TOKENS, attention_mask=mask, use_cache=use_cache)
    found = ask(logits_to_keep=1, output_hidden_states=hidden).logits
    for row, last in enumerate([TOKENS.shape[1] - 1, 11]):
        torch.testing.assert_close(found[row, 0], ask().logits[row, last])


def test_what_is_no_number_of_places_is_refused(model):
    assert model(TOKENS, logits_to_keep=np.int64(1)).logits.shape[1] == 1
    with pytest.raises(TypeError, match="list"):
        model(TOKENS, logits_to_keep=[0, 2])


def test_tokens_may_be_int32(model):
    assert torch.equal(model(TOKENS.int()).logits, model(TOKENS).logits)


def test_the_loss_is_that_of_the_lm_and_needs_no_real_padding(model):
    loss = model(TOKENS, labels=TOKENS).loss
    torch.testing.assert_close(loss, model.lm.loss(TOKENS[:, :-1], TOKENS[:, 1:]))
    padding = torch.full((8, 3), 99)
    for sides in ((padding, TOKENS), (TOKENS, padding), (TOKENS[:, :4], padding, TOKENS[:, 4:])):
        tokens = torch.cat(sides, 1)
        padded = model(tokens, attention_mask=tokens != 99, labels=tokens)
        torch.testing.assert_close(padded.loss, loss)
        real = padded.logits[tokens != 99].view(8, 20, 17)
        torch.testing.assert_close(real, model(TOKENS).logits)


def test_gradient_checkpointing_runs_each_layer_again_until_it_is_switched_off(model):
    calls = []
    for block in model.lm.stack.blocks:
        block.mixer.register_forward_hook(lambda *_: calls.append(1))
    enable = model.gradient_checkpointing_enable
    reentrant = partial(enable, {"use_reentrant": True})
    again = partial(checkpoint, use_reentrant=False)
    every_other = partial(model._set_gradient_checkpointing, True, again, every_n_layers=2)
    disable = model.gradient_checkpointing_disable
    for switch, count in ((enable, 4), (reentrant, 4), (every_other, 3), (disable, 2)):
        switch()
        calls.clear()
        model(TOKENS, labels=TOKENS).loss.backward()
        assert len(calls) == count


def test_labels_of_nothing_give_a_loss_of_zero(model):
    assert model(TOKENS, labels=torch.full_like(TOKENS, -100)).loss == 0


def test_a_cache_continues_where_it_was(model):
    whole = model(TOKENS).logits
    first = model(TOKENS[:, :7], use_cache=True)
    cache = first["cache"] if "cache" in first else first["past_key_values"]
    parts = [first.logits]
    with torch.no_grad():
        for part in TOKENS[:, 7:].split([1, 1, 5, 1, 5], dim=1):
            parts.append(model(part, past_key_values=cache).logits)
    assert cache.get_seq_length() == 20
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_a_prompt_that_was_read_once_serves_two_continuations(model):
    prompt, ends = TOKENS[:1, :9], ([3, 1], [2, 2, 2])
    cache = MezzoCache(model.lm, 1)
    with torch.inference_mode():
        model(prompt, past_key_values=cache)
    for end in ends:
        ids = torch.cat([prompt, torch.tensor([end])], 1)
        mine = copy.deepcopy(cache)
        new = model.generate(ids, past_key_values=mine, max_new_tokens=6)[:, ids.shape[1] :]
        assert new.tolist() == generate(model.lm, ids.tolist(), max_new_tokens=6)


def test_a_step_goes_on_beyond_the_room_that_was_reserved(model):
    new = model.generate(TOKENS[:2], max_new_tokens=150)[:, 20:]
    assert new.tolist() == generate(model.lm, TOKENS[:2].tolist(), max_new_tokens=150)


def test_a_prompt_is_read_in_parts(model):
    for beams in (1, 3):
        asked = {"inputs": TOKENS[:2], "max_new_tokens": 5, "num_beams": beams}
        assert torch.equal(model.generate(**asked, prefill_chunk_size=6), model.generate(**asked))


@pytest.mark.any_shapes  # it is compiled
def test_a_static_cache_has_room_for_all_so_a_compiled_step_is_compiled_once(model):
    """Room that grows would have been made anew for the 65th token."""
    given = {"inputs": TOKENS[:2], "max_new_tokens": 80, "cache_implementation": "static"}
    plain = model.generate(TOKENS[:2], max_new_tokens=80)
    beams = {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(model.generate(**given | beams), model.generate(TOKENS[:2], **beams))
    samples = {"max_new_tokens": 2, "do_sample": True, "num_return_sequences": 3}
    assert len(model.generate(**given | samples)) == 6
    torch._dynamo.reset()
    compiled = CompileCounter()
    model.forward = torch.compile(model.forward, backend=compiled)
    counts = []
    streamer = SimpleNamespace(put=lambda _: counts.append(compiled.frame_count), end=lambda: None)
    found = model.generate(**given | {"inputs": TOKENS[:1]}, streamer=streamer)
    assert torch.equal(found, plain[:1])
    assert counts[10] == counts[-1] > 0
    assert len(counts) == 81


@pytest.mark.parametrize("kind", ["quantized", "offloaded", "sliding_window"])
def test_a_cache_of_keys_and_values_alone_is_one_line(model, kind):
    with pytest.raises(UserError, match=rf"must be static, dynamic or None, got '{kind}'"):
        model.generate(TOKENS, max_new_tokens=2, cache_implementation=kind)


def test_a_stack_of_another_package_needs_leave(monkeypatch, tmp_path):
    config = LMConfig(17, 16, stack=RetrievalConfig())
    with pytest.raises(UserError, match="toys"):
        MezzoConfig(config)
    monkeypatch.setattr(MezzoConfig, "allowed_packages", ("toys",))
    model = built(config)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    given = {"max_new_tokens": 9, "num_beams": 3}
    beams = loaded.generate(TOKENS[:2], **given)
    assert torch.equal(beams, model.generate(TOKENS[:2], **given, use_cache=False))


def test_a_larger_vocabulary_is_saved_and_read(model, tmp_path):
    before = model.config.lm_config.init_std
    model.resize_token_embeddings(200, mean_resizing=False)
    assert model.lm.embed.weight[17:].std() < 1.5 * before
    model.resize_token_embeddings(23)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm.vocab_size == loaded.config.vocab_size == 23
    tokens = torch.tensor([[3, 22]])
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"attention_mask": torch.ones(8, 4)}, r"attention_mask must be \(8, S\)"),
        ({"attention_mask": torch.ones(8, 1, 20, 20)}, "attention_mask must be"),
        ({"past_key_values": DynamicCache()}, "cache must be a MezzoCache.*got DynamicCache"),
        ({"inputs_embeds": torch.ones(8, 20, 16)}, "give one of input_ids and inputs_embeds"),
        ({"position_ids": torch.arange(1, 21)[None]}, "position_ids must count the real tokens"),
        ({"labels": TOKENS.float()}, r"labels must be int64 of shape \(8, 20\), got torch.float32"),
        ({"labels": TOKENS[:, 1:]}, r"labels must be int64 .* of shape \(8, 19\)"),
        ({"input_ids": TOKENS[0]}, r"input_ids must be \(B, T\), got \(20,\)"),
        ({"output_attentions": True}, "does not take output_attentions"),
    ],
)
def test_what_it_does_not_take_is_one_line(model, given, words):
    with pytest.raises(UserError, match=words):
        model(**{"input_ids": TOKENS, **given})


def test_labels_beyond_the_vocabulary_are_named(model):
    with pytest.raises(ValueError, match=r"labels must be in \[0, 17\) or -100, got 101"):
        model(TOKENS, labels=TOKENS + 100)


def test_embeddings_take_the_place_of_tokens(model):
    tokens, mask = torch.tensor([[1, 2, 3, 4], [9, 9, 5, 6]]), torch.ones(2, 4)
    mask[1, :2] = 0
    with torch.no_grad():
        embedded = model.get_input_embeddings()(tokens)
        wanted = model(tokens, attention_mask=mask, labels=tokens)
        found = model(inputs_embeds=embedded, attention_mask=mask, labels=tokens)
    assert torch.equal(found.loss, wanted.loss)
    torch.testing.assert_close(found.logits[mask.bool()], wanted.logits[mask.bool()])
    wanted = model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)
    found = model.generate(
        inputs_embeds=embedded, attention_mask=mask, max_new_tokens=5, do_sample=False
    )
    assert torch.equal(found, wanted[:, 4:])
    prompt = torch.randn(1, 3, 16, requires_grad=True)  # as prompt tuning learns it
    model(inputs_embeds=prompt, labels=tokens[:1, :3]).loss.backward()
    assert prompt.grad.abs().amax(-1).gt(0).tolist() == [[True, True, False]]


def test_hidden_states_are_what_blocks_and_head_take(model):
    lm, tokens, mask = model.lm, TOKENS[:2, :6].clone(), torch.ones(2, 6)
    tokens[1, :2], mask[1, :2] = 9, 0
    with torch.no_grad():
        found = model(tokens, attention_mask=mask, output_hidden_states=True).hidden_states
        wanted = [lm.embed(TOKENS[:1, :6])]
        for block in lm.stack.blocks:
            wanted.append(block(wanted[-1])[0])
        wanted[-1] = lm.norm(wanted[-1])
        torch.testing.assert_close([each[:1] for each in found], wanted)
        alone = model(tokens[1:, 2:], output_hidden_states=True).hidden_states
        torch.testing.assert_close([each[1:, 2:] for each in found], list(alone))
    assert model(tokens).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(tokens).hidden_states) == 3


def test_generate_gives_the_hidden_states_of_every_step(model):
    made = model.generate(
        TOKENS[:2, :6], max_new_tokens=4, output_hidden_states=True, return_dict_in_generate=True
    )
    whole = model(made.sequences[:, :-1], output_hidden_states=True).hidden_states
    steps = [torch.cat(parts, 1) for parts in zip(*made.hidden_states, strict=True)]
    torch.testing.assert_close(steps, list(whole))


def test_hidden_states_that_are_not_there_are_refused(model, monkeypatch):
    with pytest.raises(UserError, match="needs a cache that takes no tokens back"):
        model(TOKENS, past_key_values=MezzoCache(model.lm, 8, 3), output_hidden_states=True)
    monkeypatch.setattr(MezzoConfig, "allowed_packages", ("toys",))
    other = built(LMConfig(17, 16, stack=RetrievalConfig()))
    with pytest.raises(UserError, match="blocks run one after another, got RetrievalStack"):
        other(TOKENS, output_hidden_states=True)


@pytest.mark.parametrize("given", [{}, {"inputs_embeds": torch.ones(2, 4, 15)}])
def test_without_tokens_it_says_what_it_takes(model, given):
    with pytest.raises(ValueError, match=r"give one of input_ids|or embedded, \(B, T, 16\)"):
        model(**given)


def test_places_may_be_told_where_they_are_those_of_the_real_tokens(model):
    mask = torch.ones(8, 20, dtype=torch.int64)
    mask[0, :3] = mask[1, 18:] = 0
    places = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    wanted = model(TOKENS, attention_mask=mask).logits[mask.bool()]
    told = partial(model, TOKENS, attention_mask=mask)
    torch.testing.assert_close(told(position_ids=places).logits[mask.bool()], wanted)
    with pytest.raises(UserError, match="position_ids must count the real tokens"):
        told(position_ids=torch.arange(20)[None])
    cache = MezzoCache(model.lm, 8)
    model(TOKENS[:, :7], attention_mask=mask[:, :7], past_key_values=cache)
    model(
        TOKENS[:, 7:12], attention_mask=mask[:, :12], past_key_values=cache,
        position_ids=places[:, 7:12],
    )  # fmt: skip
    given = {"past_key_values": cache, "position_ids": places[:, 7:12]}
    with pytest.raises(UserError, match="or on from the cache"):
        model(TOKENS[:, 12:17], attention_mask=mask[:, :17], **given)
    with pytest.raises(UserError, match="need the attention_mask of all tokens"):
        model(TOKENS[:, 12:17], **given)


def test_a_cache_of_another_model_is_refused(model):
    with pytest.raises(UserError, match="got another model's"):
        model(TOKENS, past_key_values=MezzoCache(built().lm, 8))


def test_weights_that_are_elsewhere_until_needed_give_a_cache_in_no_place(model):
    expected = model(TOKENS).logits
    moved = cpu_offload(model, torch.device("cpu"))
    assert torch.equal(moved(TOKENS).logits, expected)
    with pytest.raises(UserError, match="all weights on one device, and they are on meta"):
        moved.generate(TOKENS, max_new_tokens=2)
    assert moved.generate(TOKENS, max_new_tokens=2, use_cache=False).shape == (8, 22)


def drafting(model, num_drafted: int) -> MezzoForCausalLM:
    model.generation_config.num_assistant_tokens = num_drafted
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def test_an_assistant_goes_on_from_the_cache_of_an_earlier_turn():
    model, assistant = peaked(0), drafting(peaked(0), 5)
    options = {"max_new_tokens": 8, "assistant_model": assistant, "return_dict_in_generate": True}
    first = model.generate(torch.tensor([[3, 1, 4]]), **options)
    prompt, cache = torch.cat([first.sequences, torch.tensor([[1, 5]])], 1), first[CACHE]
    again = model.generate(prompt, **options, **{CACHE: cache})
    assert torch.equal(again.sequences, model.generate(prompt, max_new_tokens=8))
    assert cache.get_seq_length() < again.sequences.shape[1]  # it read no token twice
    begun = MezzoCache(model.lm, 1)
    model(prompt[:, :2], use_cache=True, **{CACHE: begun})
    rest = {"attention_mask": torch.ones_like(prompt), CACHE: begun}  # and the new tokens alone
    last = model.generate(prompt[:, 2:], **options, **rest).sequences
    assert torch.equal(last, again.sequences[:, 2:])


@pytest.mark.parametrize(("seed", "most_calls"), [(0, 15), (1, 41)])
def test_an_assistant_saves_calls_of_the_model_and_changes_no_token(seed, most_calls):
    """The assistant is right always (a copy), or seldom; a prompt takes two calls at most."""
    model, assistant = peaked(0), drafting(peaked(seed), 5)
    prompt = torch.tensor([[3, 1, 4]])
    plain = model.generate(prompt, max_new_tokens=40)
    calls = []
    model.lm.embed.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(model.generate(prompt, max_new_tokens=40, assistant_model=assistant), plain)
    assert len(calls) <= most_calls
    assert len(plain.unique()) > 2


@pytest.mark.parametrize("given", [{}, {"input_ids": TOKENS[:1]}])
def test_an_assistant_has_no_embeddings_to_go_on_from(model, given):
    given = {"inputs_embeds": model.lm.embed(TOKENS[:1]), "max_new_tokens": 5, **given}
    with pytest.raises(UserError, match="give input_ids, and no inputs_embeds"):
        model.generate(assistant_model=drafting(built(), 5), **given)


def test_a_first_part_of_the_model_is_no_assistant(model):
    with pytest.raises(UserError, match="assistant_early_exit must be None"):
        model.generate(TOKENS[:1], max_new_tokens=5, assistant_early_exit=1)


def test_the_prompt_itself_proposes_tokens(model):
    given = {"inputs": TOKENS[:1], "max_new_tokens": 20, "eos_token_id": 16}
    found = model.generate(**given, prompt_lookup_num_tokens=4)
    alone = model.generate(**given)
    assert torch.equal(found[:, : alone.shape[1]], alone)  # transformers 5.6 does not stop there


@torch.no_grad()
def test_cropped_tokens_have_never_been(model):
    """By steps and by forwards, before and after more tokens than there is room to go back."""
    cache = MezzoCache(model.lm, 8, rollback=3)
    model(TOKENS[:, :9], cache=cache)
    for wrong in (TOKENS[:, 3:5], TOKENS[:, 3:4], TOKENS[:, 2:5]):
        model(wrong, cache=cache)
        cache.crop(-wrong.shape[1])
    for i in range(9, 14):
        model(TOKENS[:, i : i + 1], cache=cache)
    mine = copy.deepcopy(cache)
    cache.crop(-2)
    assert (cache.get_seq_length(), mine.get_seq_length()) == (12, 14)
    whole = model(TOKENS).logits
    torch.testing.assert_close(model(TOKENS[:, 12:], cache=cache).logits, whole[:, 12:])
    torch.testing.assert_close(model(TOKENS[:, 14:], cache=mine).logits, whole[:, 14:])


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@torch.no_grad()
def test_cropped_padding_takes_no_token_back(model, order):
    """As `generate` takes for padding what an assistant proposes and is its token of padding."""
    cache = MezzoCache(model.lm, 2, rollback=4)
    model(TOKENS[:2, :9], cache=cache)
    wrong, mask = TOKENS[2:4, :3], torch.tensor([[1, 0, 1], [0, 0, 0]])
    model(wrong, attention_mask=mask, cache=cache)
    model(wrong[:, :1], cache=cache)
    cache.reorder_cache(torch.tensor(order))
    cache.crop(-2)  # a step, and the last column, which is padding of the second row
    assert cache.get_seq_length() == 11
    rows = zip(TOKENS[:2].tolist(), [wrong[0, :1].tolist(), []], strict=True)
    rows = [row[:9] + kept + row[9:14] for row, kept in rows]
    whole = [model(torch.tensor([row])).logits[0, -5:] for row in rows]
    after = model(TOKENS[order, 9:14], cache=cache).logits
    torch.testing.assert_close(after, torch.stack(whole)[order])


@pytest.mark.parametrize("columns", [2, 4])
@torch.no_grad()
def test_padding_is_remembered_beyond_the_room_and_tokens_come_before_it(model, columns):
    cache = MezzoCache(model.lm, 2, rollback=4)
    model(TOKENS[:2, :9], cache=cache)
    for _ in range(2):
        model(TOKENS[:2, :3], attention_mask=torch.zeros(2, 3), cache=cache)
    cache.crop(-4)
    cache.crop(-columns)
    left = 9 - max(columns - 2, 0)
    after = model(TOKENS[:2, left:14], cache=cache).logits
    torch.testing.assert_close(after, model(TOKENS[:2]).logits[:, left:14])


def test_a_crop_beyond_its_room_is_one_line(model):
    for room in (0, 3):
        cache = MezzoCache(model.lm, 8, rollback=room)
        assert cache.is_croppable == (room > 0)
        model(TOKENS, cache=cache)
        with pytest.raises(UserError, match=rf"crop can take back {room} tokens, got 4: .*\(4\)"):
            cache.crop(-4)
        assert cache.get_seq_length() == 20
    cache.crop(-3)
    with pytest.raises(ValueError, match="n must be at most 0 in row 0"):
        cache.crop(-1)
